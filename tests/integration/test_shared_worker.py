"""One worker process in front of two gateways: real greetings, arenas and sockets."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from shared.board import ELSEWHERE, IDLE, Board
from shared.messages import BatchDone, UnloadModel
from shared.runtime_dir import RuntimeDir
from tests.support.fake_gateway import FakeGateway, gateway_in, greeted
from tests.support.stack import eventually
from tests.support.worker_parts import batch, item
from tests.support.worker_process import codes, load, simulated, worker_in

BATCH_MS = 30.0


class Pair(NamedTuple):
    """Two gateways with the same model loaded."""

    first: FakeGateway
    second: FakeGateway
    version: str


@asynccontextmanager
async def pair_in(folder: Path, batch_ms: float = BATCH_MS) -> AsyncIterator[Pair]:
    version = simulated(folder, a_ms=batch_ms)
    run = folder / "run"
    async with worker_in(folder, gateways=2), gateway_in(run) as first, gateway_in(run, 1) as second:
        await asyncio.gather(greeted(first), greeted(second))
        loaded, again = await load(first, "sim", version), await load(second, "sim", version, model=9)
        assert again.load_s == loaded.load_s, "loaded once"
        yield Pair(first, second, version)


def doing(gateway: FakeGateway) -> int:
    board = Board(gateway.arena.fd, gateway.arena.nbytes)
    found = board.read("worker-0")
    board.close()
    assert found is not None
    return found.batch


async def test_both_get_their_own_answers_and_take_turns(tmp_path: Path) -> None:
    slow = simulated(tmp_path, "slow", a_ms=400.0)
    async with pair_in(tmp_path) as (first, second, _):
        await load(first, "slow", slow, model=2)
        await load(second, "slow", slow, model=2)
        for gateway in (first, second):
            gateway.send(batch(item(100, 5), number=100, model=2))  # all others come while these run
        for number in range(1, 7):
            first.send(batch(item(number, 5), number=number))
        for number in range(1, 4):
            second.send(batch(item(number, 5), number=number, model=9))
        mine, theirs = await first.many(BatchDone, 7), await second.many(BatchDone, 4)
        assert [done.batch for done in mine] == [100, 1, 2, 3, 4, 5, 6]
        assert [done.batch for done in theirs] == [100, 1, 2, 3]
        assert {tuple(codes(done).values()) for done in (*mine, *theirs)} == {(None,)}
        runs = sorted(
            (done.started_s, done.copy_s + done.run_s, who)
            for who, each in (("a", mine), ("b", theirs))
            for done in each
        )
        order = "".join(who for _, _, who in runs)
        assert order.rindex("b") <= 8, f"turn by turn, and not behind all that was there before: {order}"
        assert all(start + spent <= later for (start, spent, _), (later, _, _) in pairwise(runs)), "one after another"


async def test_one_that_dies_takes_only_its_own_batches_along_and_its_next_life_is_found(tmp_path: Path) -> None:
    async with pair_in(tmp_path) as (first, second, version):
        first.send(batch(item(1, 5), number=1))
        for number in range(1, 9):
            second.send(batch(item(number, 5), number=number, model=9))
        await first.next(BatchDone)
        for number in range(2, 4):
            first.send(batch(item(number, 5), number=number))
        await second.next(BatchDone)
        await second.close()
        async with gateway_in(tmp_path / "run", 1) as again:
            for number in range(4, 10):
                first.send(batch(item(number, 5), number=number))
            await greeted(again)  # while the other one's batches run
            loaded = await load(again, "sim", version, model=3)
            assert loaded.load_s > 0
            again.send(batch(item(1, 5), number=1, model=3))
            assert codes(await again.next(BatchDone)) == {1: None}
            mine = await first.many(BatchDone, 9)
            assert [codes(done) for done in mine] == [{number: None} for number in range(1, 10)]
        assert len(first.hellos) == 1, "it never left the first one"


async def test_a_model_unloaded_by_one_stays_for_the_other(tmp_path: Path) -> None:
    async with pair_in(tmp_path) as (first, second, _):
        first.send(UnloadModel(1))
        first.send(batch(item(1, 5)))
        assert codes(await first.next(BatchDone)) == {1: "not_ready"}
        second.send(batch(item(1, 5), model=9))
        assert codes(await second.next(BatchDone)) == {1: None}


async def test_each_sees_on_its_board_whom_the_worker_works_for(tmp_path: Path) -> None:
    async with pair_in(tmp_path, 400.0) as (first, second, _):
        assert (doing(first), doing(second)) == (IDLE, IDLE)
        for number in (41, 42):
            first.send(batch(item(number, 5), number=number))
        await first.next(BatchDone)
        eventually("the second batch to run", lambda: doing(first) == 42, 5.0)
        assert doing(second) == ELSEWHERE
        await first.many(BatchDone, 2)
        second.send(batch(item(1, 5), model=77))  # not loaded: its answer comes after what the worker showed before
        await second.next(BatchDone)
        assert (doing(first), doing(second)) == (IDLE, IDLE)


async def test_a_gateway_that_hangs_in_its_greeting_holds_up_nobody(tmp_path: Path) -> None:
    version = simulated(tmp_path)
    runtime = RuntimeDir.open(tmp_path / "run")
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(os.fspath(runtime.gateway_socket(1)))
        hung.listen()
        async with worker_in(tmp_path, gateways=2), gateway_in(tmp_path / "run") as gateway:
            await greeted(gateway)
            await load(gateway, "sim", version)
            gateway.send(batch(item(1, 5)))
            assert codes(await gateway.next(BatchDone)) == {1: None}
