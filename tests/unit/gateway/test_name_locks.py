import asyncio
from collections import defaultdict

from gateway.name_locks import NameLocks

LIMIT_S = 5.0


class Users:
    """Each says when it comes in and goes out; it stays until its `go`."""

    def __init__(self) -> None:
        self.locks = NameLocks()
        self.said: list[str] = []
        self.go = defaultdict[str, asyncio.Event](asyncio.Event)

    async def use(self, name: str, word: str) -> None:
        async with self.locks.held(name):
            self.said.append(f"{word} in")
            await self.go[word].wait()
            self.said.append(f"{word} out")
            if word == "fails":
                raise KeyError(name)

    def let_go(self, *words: str) -> None:
        for word in words:
            self.go[word].set()

    async def started(self, name: str, *words: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.use(name, word)) for word in words]
        await asyncio.wait(tasks, timeout=0)
        return tasks


async def test_one_at_a_time_in_order_for_each_name_and_only_names_in_use_are_kept() -> None:
    users = Users()
    async with asyncio.timeout(LIMIT_S):
        tasks = await users.started("a", "first", "second") + await users.started("b", "other")
        assert users.said == ["first in", "other in"]
        assert len(users.locks) == 2
        users.let_go("first", "second", "other")
        await asyncio.gather(*tasks)
    assert [word for word in users.said if "other" not in word] == ["first in", "first out", "second in", "second out"]
    assert len(users.locks) == 0


async def test_who_fails_or_gives_up_leaves_the_others_their_lock() -> None:
    users = Users()
    async with asyncio.timeout(LIMIT_S):
        tasks = await users.started("a", "fails", "fails", "gives up", "last")
        tasks[2].cancel()
        users.let_go("fails", "last")
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in outcomes] == [KeyError, KeyError, asyncio.CancelledError, type(None)]
    assert users.said == ["fails in", "fails out"] * 2 + ["last in", "last out"]
    assert len(users.locks) == 0


async def test_who_comes_after_a_failure_waits_behind_those_who_waited_already() -> None:
    """The lock of the one that failed must not be thrown away under the second, or the third would be inside, too."""
    users = Users()
    async with asyncio.timeout(LIMIT_S):
        tasks = await users.started("a", "fails", "second")
        users.let_go("fails")
        await asyncio.wait(tasks[:1])
        tasks += await users.started("a", "third")
        assert users.said[2:] == ["second in"]
        users.let_go("second", "third")
        await asyncio.gather(*tasks[1:])
    assert users.said[2:] == ["second in", "second out", "third in", "third out"]
    assert isinstance(tasks[0].exception(), KeyError)
