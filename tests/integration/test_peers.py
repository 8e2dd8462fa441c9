"""The sockets between gateways: who may speak, how long, and how many at once."""

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from gateway import peers
from gateway.peers import Ask, Changes, PeerGone, PeerServer, Show, ask
from shared.errors import Code, InternalFault

LIMIT_S = 3.0
"""Less than a peer is given by itself, so that a limit that does not work is seen."""


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="hr-") as name:
        yield Path(name) / "one.peer"


class Answers:
    """Answers with `body`; a question about changes meets a bug."""

    def __init__(self, body: bytes = b"fine") -> None:
        self.body = body
        self.asked = 0

    async def __call__(self, asked: Ask) -> bytes:
        self.asked += 1
        if isinstance(asked, Changes):
            raise KeyError("a bug of ours")
        return self.body


@asynccontextmanager
async def listening(path: Path, answers: Answers) -> AsyncIterator[PeerServer]:
    server = PeerServer(path, answers)
    await server.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield server
    finally:
        server.close()


def mode(path: Path) -> int | None:
    return path.stat().st_mode & 0o777 if path.exists() else None


async def test_garbage_and_bugs_are_answered_or_cut_off_and_the_next_question_is_not(path: Path) -> None:
    async with listening(path, Answers()):
        for data in (b"\x04\x00\x00\x00junk", b"\x01"):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        with pytest.raises(InternalFault) as caught:
            await ask(path, Changes(), LIMIT_S)
        assert caught.value.code == Code.INTERNAL
        assert "a bug of ours" not in caught.value.text
        assert await ask(path, Show("metrics"), LIMIT_S) == b"fine"
    assert mode(path) is None
    with pytest.raises(PeerGone):
        await ask(path, Show("metrics"), LIMIT_S)


async def test_who_announces_too_much_is_cut_off_before_any_of_it_comes(path: Path) -> None:
    async with listening(path, Answers()):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write((peers._MAX_BYTES + 1).to_bytes(4, "little"))
        assert await reader.read() == b""
        writer.close()


async def test_the_socket_is_private_and_another_user_gets_no_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers()
    async with listening(path, answers):
        assert mode(path) == 0o600
        monkeypatch.setattr(peers, "peer_of", lambda _: (1, os.getuid() + 1))
        with pytest.raises(PeerGone):
            await ask(path, Show("metrics"), LIMIT_S)
    assert answers.asked == 0


async def test_silent_peers_can_not_pile_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_MAX_TALKING", 3)
    async with listening(path, Answers()):
        silent = [await asyncio.open_unix_connection(str(path)) for _ in range(3)]
        with pytest.raises(PeerGone):
            await ask(path, Show("metrics"), LIMIT_S)
        silent[0][1].write_eof()
        assert await silent[0][0].read() == b""
        assert await ask(path, Show("metrics"), LIMIT_S) == b"fine"
        for _, writer in silent:
            writer.close()


async def test_who_does_not_take_its_answer_is_cut_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_TALK_LIMIT_S", 0.1)
    async with listening(path, Answers(bytes(8 << 20))) as server:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))
            question = msgspec.msgpack.encode(Show("metrics"))
            asking.sendall(len(question).to_bytes(4, "little") + question)
            hung_up = select.poll()
            hung_up.register(asking, 0)  # POLLHUP comes unasked
            assert await asyncio.to_thread(hung_up.poll, LIMIT_S * 1000 / 2) == [(asking.fileno(), select.POLLHUP)]
        assert not server._tasks, "and nothing of the answer is kept"


async def test_a_long_answer_comes_whole(path: Path) -> None:
    body = os.urandom(4 << 20)
    async with listening(path, Answers(body)):
        assert await ask(path, Show("metrics"), LIMIT_S) == body
