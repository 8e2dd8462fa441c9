"""The greeting over real Unix sockets. The worker's blocking side runs in threads and, for its death, in a process."""

import asyncio
import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest

from shared import handover
from shared.arena import Arena, AttachedArena
from shared.handover import Greeting, Knock, Refusal, Welcomer
from shared.messages import PROTOCOL_VERSION, Hello, Refused, Welcome

LIMIT_S = 10
T = TypeVar("T")
HELLO = Hello(PROTOCOL_VERSION, os.getpid(), "worker-0", "cpu")

GREET_AND_HANG = """
import os, sys, select, signal
from pathlib import Path
from shared.handover import Knock
from shared.messages import Hello
knock = Knock.at(Path(sys.argv[1]), Hello(int(sys.argv[2]), os.getpid(), "worker-0", "cpu"))
select.select([knock], [], [], 5.0)
greeting = knock.answer()
print("greeted" if greeting else "nobody", flush=True)
signal.pause()
"""


def greet(path: Path, hello: Hello, limit_s: float) -> Greeting | None:
    """Knock and wait for the answer."""
    knock = Knock.at(path, hello)
    if knock is None:
        return None
    if select.select([knock], [], [], limit_s)[0]:
        return knock.answer()
    knock.close()
    return None


class Gateway:
    """A Welcomer with callbacks that take notes."""

    def __init__(self, path: Path) -> None:
        self.arena = Arena.create(1 << 20)
        self.path = path
        self.hellos: list[tuple[Hello, int]] = []
        self.lost: asyncio.Queue[bytes] = asyncio.Queue()
        self.refuse_with = ""
        self.welcomer = Welcomer(path, self.arena.fd, self.on_hello, self.lost.put_nowait)

    def on_hello(self, hello: Hello, pid: int) -> Welcome | Refused:
        self.hellos.append((hello, pid))
        if self.refuse_with:
            return Refused(self.refuse_with)
        identity = f"worker-{len(self.hellos)}".encode()
        return Welcome(PROTOCOL_VERSION, 42, "ipc:///nowhere", identity, self.arena.nbytes)

    async def next_lost(self) -> bytes:
        async with asyncio.timeout(LIMIT_S):
            return await self.lost.get()


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="hr-") as folder:
        yield Path(folder) / "gateway.sock"


@pytest.fixture
async def gateway(path: Path) -> AsyncIterator[Gateway]:
    made = Gateway(path)
    await made.welcomer.start()
    yield made
    await made.welcomer.close()
    made.arena.close()


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(work, *arguments)


async def greeted(path: Path) -> Greeting:
    greeting = await in_thread(greet, path, HELLO, 5.0)
    assert greeting is not None
    return greeting


async def test_a_worker_gets_the_arena_and_both_see_the_stream_end(gateway: Gateway, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600  # noqa: ASYNC240 - a look, not a wait
    slot = gateway.arena.lease(4)
    assert slot is not None
    with contextlib.closing(await greeted(path)) as greeting:
        assert gateway.hellos == [(HELLO, os.getpid())]
        assert greeting.welcome.identity == b"worker-1"
        assert greeting.gateway_alive()
        assert not os.get_inheritable(greeting.arena_fd)
        attached = AttachedArena.attach(greeting.arena_fd, greeting.welcome.arena_bytes)
        attached.array(slot.ref, "UINT8", (4,))[:] = (1, 2, 3, 4)
        assert bytes(slot.view) == b"\x01\x02\x03\x04"
        attached.close()
        assert gateway.lost.empty()
    assert await gateway.next_lost() == b"worker-1"
    assert repr(gateway.welcomer) == "<Welcomer workers=[] bad=0>"


async def test_the_gateways_end_is_seen_by_the_worker_without_on_lost(gateway: Gateway, path: Path) -> None:
    greeting = await greeted(path)
    await gateway.welcomer.close()
    assert not greeting.gateway_alive()
    assert gateway.lost.empty()
    assert not path.exists()  # noqa: ASYNC240 - a look, not a wait
    greeting.close()
    assert await in_thread(greet, path, HELLO, 1.0) is None


async def test_drop_ends_one_stream_and_reports_it_lost_once(gateway: Gateway, path: Path) -> None:
    first, second = await greeted(path), await greeted(path)
    gateway.welcomer.drop(b"worker-1")
    gateway.welcomer.drop(b"worker-1")
    gateway.welcomer.drop(b"nobody")
    assert await gateway.next_lost() == b"worker-1"
    assert not first.gateway_alive()
    assert second.gateway_alive()
    first.close()
    second.close()
    assert await gateway.next_lost() == b"worker-2"
    assert gateway.lost.empty()


async def test_sigkill_of_a_worker_is_seen_at_once(gateway: Gateway, path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", GREET_AND_HANG, str(path), str(PROTOCOL_VERSION)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        assert await process.stdout.readline() == b"greeted\n"
    assert gateway.hellos[0][1] == process.pid
    started_s = asyncio.get_running_loop().time()
    process.send_signal(signal.SIGKILL)
    assert await gateway.next_lost() == b"worker-1"
    assert asyncio.get_running_loop().time() - started_s < 1.0
    await process.wait()


async def test_a_refusal_carries_its_reason(gateway: Gateway, path: Path) -> None:
    gateway.refuse_with = "worker-0 is here already"
    with pytest.raises(Refusal, match="worker-0 is here already"):
        await in_thread(greet, path, HELLO, 5.0)
    assert gateway.lost.empty()


async def test_another_protocol_version_is_refused_with_both_versions(gateway: Gateway, path: Path) -> None:
    with pytest.raises(Refusal, match=f"speaks protocol version 99, the gateway version {PROTOCOL_VERSION}"):
        await in_thread(greet, path, Hello(99, 1, "worker-0", "cpu"), 5.0)
    assert gateway.hellos == []
    assert gateway.welcomer.bad_greetings == 1


async def test_a_gateway_of_another_version_is_refused_by_the_worker(
    gateway: Gateway, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    gateway.on_hello = None  # type: ignore[method-assign, assignment]  # must not be reached
    monkeypatch.setattr(
        gateway.welcomer, "_on_hello", lambda _hello, _pid: Welcome(99, 42, "ipc:///nowhere", b"x", 4096)
    )
    with pytest.raises(Refusal, match="another protocol"):
        await in_thread(greet, path, HELLO, 5.0)
    assert await gateway.next_lost() == b"x"
    assert open_descriptors() == before


async def test_another_users_process_is_cut_off(gateway: Gateway, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = handover.peer_of
    monkeypatch.setattr(handover, "peer_of", lambda stream: (real(stream)[0], 12345))
    with pytest.raises(Refusal, match="another user"):
        await in_thread(greet, path, HELLO, 5.0)
    answered = await in_thread(speak, path, framed(HELLO))
    assert answered == b""
    assert gateway.hellos == []
    assert gateway.welcomer.bad_greetings >= 1


def framed(message: object) -> bytes:
    return handover._framed(message)  # type: ignore[arg-type]  # anything goes in a test


def speak(path: Path, data: bytes) -> bytes:
    """Send raw bytes and return what comes back until the other side closes."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(LIMIT_S)
        stream.connect(str(path))
        received = b""
        try:
            stream.sendall(data)
            while part := stream.recv(4096):
                received += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return received


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 5000) + b"x" * 5000,
        struct.pack("<I", 4) + b"\xdd\xff\xff\xff",
        struct.pack("<I", 0),
        struct.pack("<I", 20) + b"cos\nsystem\n(S'true'\n",
    ],
)
async def test_garbage_is_told_that_it_is_and_the_next_worker_is_welcome(
    gateway: Gateway, path: Path, data: bytes
) -> None:
    assert b"another protocol" in await in_thread(speak, path, data)
    assert gateway.welcomer.bad_greetings == 1
    (await greeted(path)).close()
    assert await gateway.next_lost() == b"worker-1"


async def test_silent_peers_are_cut_off_and_do_not_stand_in_the_way(
    gateway: Gateway, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_HELLO_LIMIT_S", 0.2)
    stalled = [asyncio.create_task(in_thread(speak, path, b"\x05\x00")) for _ in range(3)]
    (await greeted(path)).close()
    assert await gateway.next_lost() == b"worker-1"
    stalled += [asyncio.create_task(in_thread(stay_silent, path)) for _ in range(3)]
    assert await asyncio.gather(*stalled) == [b""] * 6
    assert gateway.welcomer.bad_greetings == 6


def stay_silent(path: Path) -> bytes:
    return speak(path, b"")


async def test_a_flood_of_silent_connections_is_bounded(gateway: Gateway, path: Path) -> None:
    streams = []
    for _ in range(handover._MAX_GREETING + 5):
        stream = socket.socket(socket.AF_UNIX)
        stream.setblocking(False)
        await asyncio.get_running_loop().sock_connect(stream, str(path))
        streams.append(stream)
        await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.get_running_loop().sock_recv(streams[-1], 1) == b""
    assert gateway.welcomer._greeting <= handover._MAX_GREETING
    for stream in streams:
        stream.close()


async def test_a_failing_callback_costs_one_greeting_only(
    gateway: Gateway, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_hello: Hello, _pid: int) -> Welcome:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(gateway.welcomer, "_on_hello", broken)
        assert await in_thread(greet, path, HELLO, 5.0) is None
    assert "a bug" in caplog.text
    (await greeted(path)).close()


async def test_an_identity_in_use_is_not_given_twice(gateway: Gateway, path: Path) -> None:
    greeting = await greeted(path)
    gateway.hellos.clear()
    with pytest.raises(Refusal, match="connected already"):
        await in_thread(greet, path, HELLO, 5.0)
    assert greeting.gateway_alive()
    greeting.close()


async def test_no_gateway_is_none(path: Path) -> None:
    assert greet(path, HELLO, 1.0) is None
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        assert greet(path, HELLO, 1.0) is None
        dead.listen()
        assert greet(path, HELLO, 0.05) is None


async def test_the_socket_of_a_dead_gateway_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    gateway = Gateway(path)
    await gateway.welcomer.start()
    (await greeted(path)).close()
    await gateway.welcomer.close()
    gateway.arena.close()


async def test_a_hundred_greetings_leak_no_descriptor(gateway: Gateway, path: Path) -> None:
    (await greeted(path)).close()
    await gateway.next_lost()
    before = open_descriptors()
    for _ in range(100):
        (await greeted(path)).close()
        await gateway.next_lost()
    assert open_descriptors() == before


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))
