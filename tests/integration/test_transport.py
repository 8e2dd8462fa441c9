"""Router and Dealer over real sockets; the blocking end runs in a thread here."""

import asyncio
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest
import zmq

from shared import transport
from shared.messages import FromPool, PipelineOpened, Prepared, PrepareJob, Stop, ToPool
from shared.transport import Dealer, FrameTooBig, PeerLost, Router

GENERATION = 0xABCDEF
LIMIT_S = 20
T = TypeVar("T")
HEADER = GENERATION.to_bytes(8, "little")

PoolRouter = Router[FromPool, ToPool]
PoolDealer = Dealer[ToPool, FromPool]


@pytest.fixture
def endpoint() -> Iterator[str]:
    with TemporaryDirectory(prefix="hr-") as folder:
        yield f"ipc://{folder}/pool.sock"


class Inbox:
    """What a Router received, to be awaited."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[tuple[bytes, FromPool]] = asyncio.Queue()

    def put(self, identity: bytes, message: FromPool) -> None:
        self.got.put_nowait((identity, message))

    async def next(self) -> tuple[bytes, FromPool]:
        async with asyncio.timeout(LIMIT_S):
            return await self.got.get()


@pytest.fixture
async def router(endpoint: str) -> AsyncIterator[PoolRouter]:
    made: PoolRouter = Router(endpoint, FromPool, generation=GENERATION, high_water_mark=100)
    yield made
    made.close()


@pytest.fixture
async def inbox(router: PoolRouter) -> Inbox:
    made = Inbox()
    router.start(asyncio.get_running_loop(), made.put)
    return made


def dealer(endpoint: str, identity: bytes = b"pool-0", generation: int = GENERATION) -> PoolDealer:
    return Dealer(endpoint, ToPool, identity=identity, generation=generation, high_water_mark=100)


def job(number: int) -> PrepareJob:
    return PrepareJob(number, 1.0, 1, "image", b"payload", b"", [])


def answer(number: int) -> Prepared:
    return Prepared(number, [], b"", 0.0)


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(work, *arguments)


async def test_messages_reach_the_addressed_peer(router: PoolRouter, inbox: Inbox, endpoint: str) -> None:
    peers = {name: dealer(endpoint, name) for name in (b"pool-1", b"pool-10")}
    for peer in peers.values():
        await in_thread(peer.send, PipelineOpened(7))
    assert sorted([(await inbox.next())[0], (await inbox.next())[0]]) == [b"pool-1", b"pool-10"]
    assert router.send(b"pool-1", job(1))
    assert router.send(b"pool-10", job(10))
    for name, number in ((b"pool-1", 1), (b"pool-10", 10)):
        received = await in_thread(peers[name].receive, LIMIT_S)
        assert isinstance(received, PrepareJob)
        assert received.job == number
        peers[name].close()


async def test_an_unknown_peer_is_false_and_not_silence(router: PoolRouter, inbox: Inbox) -> None:
    assert router.send(b"nobody", job(1)) is False


async def test_a_stalled_reader_gets_all_that_was_accepted_and_the_rest_is_refused(
    router: PoolRouter, inbox: Inbox, endpoint: str
) -> None:
    peer = dealer(endpoint)
    await in_thread(peer.send, PipelineOpened(1))
    await inbox.next()
    accepted = refused = 0
    big = PrepareJob(0, 1.0, 1, "image", os.urandom(10_000), b"", [])
    while accepted < 5_000 and refused < 100:  # after the first refusal ZeroMQ's thread may still make room for a few
        big.job = accepted
        if router.send(b"pool-0", big):
            accepted += 1
        else:
            refused += 1
    assert 100 <= accepted < 5_000, "the queue has no bound"
    for number in range(accepted):
        received = await in_thread(peer.receive, LIMIT_S)
        assert isinstance(received, PrepareJob), f"message {number} of {accepted} was lost"
        assert received.job == number
    assert peer.receive(0) is None
    peer.close()


def echo(endpoint: str) -> int:
    """Answer every job until Stop, with traffic that nobody asked for in between; returns how much of it."""
    peer = dealer(endpoint)
    peer.send(PipelineOpened(1))
    extra = 0
    while isinstance(message := peer.receive(LIMIT_S), PrepareJob):
        peer.send(answer(message.job))
        if message.job % 7 == 0:
            peer.send(PipelineOpened(message.job))
            extra += 1
    peer.close()
    return extra


async def test_nothing_is_stuck_under_bursts_both_ways(router: PoolRouter, inbox: Inbox, endpoint: str) -> None:
    """ZeroMQ's descriptor is edge-triggered and a send may swallow the edge: a lost edge would hang this test."""
    total = 10_000
    dice = random.Random(1)  # noqa: S311 - not for secrets
    thread = asyncio.create_task(asyncio.to_thread(echo, endpoint))
    await inbox.next()
    sent = received = extras = 0
    while received < total:
        for _ in range(min(dice.choice([1, 1, 2, 50]), total - sent, 100 - (sent - received))):
            assert router.send(b"pool-0", job(sent))
            sent += 1
        for _ in range(dice.choice([1, sent - received])):
            _, message = await inbox.next()
            if isinstance(message, PipelineOpened):
                extras += 1
                continue
            assert message == answer(received)
            received += 1
    assert router.send(b"pool-0", Stop())
    for _ in range(extras, await asyncio.wait_for(thread, LIMIT_S)):
        await inbox.next()
    assert (router.stale_frames, router.bad_frames) == (0, 0)


async def test_an_edge_swallowed_by_a_send_is_not_missed(router: PoolRouter, inbox: Inbox, endpoint: str) -> None:
    """The loop is kept busy while a message arrives, and a send follows: the message must still be read."""
    peer = dealer(endpoint)
    await in_thread(peer.send, PipelineOpened(0))
    await inbox.next()
    for number in range(1, 200):
        thread = threading.Thread(target=peer.send, args=(PipelineOpened(number),))
        thread.start()
        thread.join()  # blocks the event loop on purpose
        assert router.send(b"pool-0", job(number))
        _, message = await inbox.next()
        assert message == PipelineOpened(number)
        assert await in_thread(peer.receive, LIMIT_S) == job(number)
    peer.close()


async def test_more_than_one_turns_worth_of_messages_is_read_without_starving_the_loop(
    router: PoolRouter, endpoint: str
) -> None:
    peers = [dealer(endpoint, f"pool-{n}".encode()) for n in range(4)]
    turns = 0
    done = asyncio.Event()
    seen: list[FromPool] = []
    for peer in peers:
        for number in range(100):
            await in_thread(peer.send, PipelineOpened(number))

    def on_message(_identity: bytes, message: FromPool) -> None:
        seen.append(message)
        if len(seen) == 400:
            done.set()

    router.start(asyncio.get_running_loop(), on_message)
    while not done.is_set():
        before = len(seen)
        await asyncio.sleep(0)
        assert len(seen) - before <= 2 * transport._DRAIN_AT_ONCE
        turns += 1
        assert turns < 1_000_000, f"{len(seen)} of 400 messages arrived"
    assert turns >= 2
    for peer in peers:
        peer.close()


async def test_a_failing_handler_is_logged_and_the_next_message_arrives(
    router: PoolRouter, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox()

    def on_message(identity: bytes, message: FromPool) -> None:
        if message == PipelineOpened(1):
            raise RuntimeError("a bug")
        inbox.put(identity, message)

    router.start(asyncio.get_running_loop(), on_message)
    peer = dealer(endpoint)
    await in_thread(peer.send, PipelineOpened(1))
    await in_thread(peer.send, PipelineOpened(2))
    assert (await inbox.next())[1] == PipelineOpened(2)
    assert "a bug" in caplog.text
    peer.close()


CANARY = Path("/tmp/headrace-pickle-canary")
PICKLE = b"cos\nmkdir\n(S'" + bytes(CANARY) + b"'\ntR."
"""Unpickling this would make a folder."""


def garbage() -> list[list[bytes]]:
    return [
        [b""],
        [b"1234567"],
        [HEADER],
        [HEADER + PICKLE],
        [HEADER + b"\xdd\xff\xff\xff\xff"],  # an array of four billion elements
        [HEADER + b"\xc6\xff\xff\xff\xffx"],  # four gigabytes of bytes
        [HEADER + b"\x91" * 100_000],  # nested beyond any stack
        [HEADER + b"\x92\xa4nope\x01"],  # no such message
        [HEADER + b"\x92\xa6opened\xa1x"],  # a field of the wrong type
        [HEADER + b"\x92\xa6opened\x01", b"one frame too many"],
        [HEADER, b"\x92\xa6opened\x01", b"", b""],
        [os.urandom(8) + b"\x92\xa6opened\x01"],
    ]


async def test_garbage_is_counted_and_harms_nobody(router: PoolRouter, inbox: Inbox, endpoint: str) -> None:
    raw: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(endpoint)
    frames = garbage()
    for parts in frames:
        raw.send_multipart(parts)
    raw.send(HEADER + b"\x92\xa6opened\x05")
    assert (await inbox.next())[1] == PipelineOpened(5)
    assert router.stale_frames == 1
    assert router.bad_frames == len(frames) - 1
    assert not CANARY.exists()  # noqa: ASYNC240 - a look, not a wait
    raw.close()
    zmq.Context.instance().term()


async def test_a_dealer_drops_garbage_and_keeps_its_time_limit(endpoint: str) -> None:
    raw: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.bind(endpoint)
    peer = dealer(endpoint)
    peer.send(PipelineOpened(1))
    identity, _ = await in_thread(raw.recv_multipart)
    frames = garbage()
    for parts in frames:
        raw.send_multipart([identity, *parts])
    assert await in_thread(peer.receive, 0.2) is None
    assert (peer.stale_frames, peer.bad_frames) == (1, len(frames) - 1)
    raw.send_multipart([identity, HEADER + b"\x91\xa4stop"])
    assert await in_thread(peer.receive, LIMIT_S) == Stop()
    peer.close()
    raw.close()
    zmq.Context.instance().term()


async def test_messages_of_another_life_are_dropped(router: PoolRouter, inbox: Inbox, endpoint: str) -> None:
    late, live = dealer(endpoint, b"pool-0", GENERATION - 1), dealer(endpoint, b"pool-1")
    await in_thread(late.send, PipelineOpened(1))
    for number in range(2, 100):
        await in_thread(live.send, PipelineOpened(number))
        assert (await inbox.next())[1] == PipelineOpened(number)
        if router.stale_frames:
            break
    assert router.stale_frames == 1
    assert router.send(b"pool-0", job(1))
    assert await in_thread(late.receive, 0.2) is None
    assert late.stale_frames == 1
    late.close()
    live.close()


async def test_a_frame_over_the_limit_is_refused_where_it_is_made(
    router: PoolRouter, inbox: Inbox, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = dealer(endpoint)
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(FrameTooBig, match="limit of 1000"):
        peer.send(Prepared(1, [], b"x" * 2000, 0.0))
    await in_thread(peer.send, PipelineOpened(1))
    await inbox.next()
    with pytest.raises(FrameTooBig):
        router.send(b"pool-0", PrepareJob(1, 1.0, 1, "image", b"x" * 2000, b"", []))
    assert router.send(b"pool-0", job(2))
    assert await in_thread(peer.receive, LIMIT_S) == job(2)
    peer.close()


async def test_a_peer_that_sends_a_giant_frame_is_cut_off_and_others_are_served(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 100_000)
    router: PoolRouter = Router(endpoint, FromPool, generation=GENERATION, high_water_mark=100)
    inbox = Inbox()
    router.start(asyncio.get_running_loop(), inbox.put)
    raw: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(endpoint)
    raw.send(HEADER + b"x" * 10_000_000)
    peer = dealer(endpoint)
    await in_thread(peer.send, PipelineOpened(3))
    assert (await inbox.next())[1] == PipelineOpened(3)
    peer.close()
    raw.close()
    router.close()
    zmq.Context.instance().term()


async def test_an_identity_can_not_be_taken_over(router: PoolRouter, inbox: Inbox, endpoint: str) -> None:
    first = dealer(endpoint)
    await in_thread(first.send, PipelineOpened(1))
    await inbox.next()
    thief: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    thief.setsockopt(zmq.LINGER, 0)
    thief.setsockopt(zmq.ROUTING_ID, b"pool-0")
    thief.connect(endpoint)
    thief.send(HEADER + b"\x92\xa6opened\x63")
    for number in range(50):
        assert router.send(b"pool-0", job(number))
        assert await in_thread(first.receive, LIMIT_S) == job(number)
    assert inbox.got.empty()
    first.close()
    thief.close()
    zmq.Context.instance().term()


def test_a_dealer_without_a_gateway_says_so_within_its_limit(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "SEND_LIMIT_S", 0.05)
    peer = dealer(endpoint)
    with pytest.raises(PeerLost, match=r"no message for 0\.05 s"):
        peer.send(PipelineOpened(1))
    peer.close()
    peer.close()


def test_receive_wakes_for_a_watched_descriptor(endpoint: str) -> None:
    peer = dealer(endpoint)
    readable, other = os.pipe()
    assert peer.receive(0.01, watch=(readable,)) is None
    os.write(other, b"x")
    assert peer.receive(None, watch=(readable,)) is None
    assert peer.receive(0, watch=()) is None
    os.close(readable)
    os.close(other)
    peer.close()


async def test_close_is_idempotent_and_ends_reading(router: PoolRouter, inbox: Inbox, endpoint: str) -> None:
    peer = dealer(endpoint)
    await in_thread(peer.send, PipelineOpened(1))
    await inbox.next()
    router.close()
    router.close()
    assert router.send(b"pool-0", job(1)) is False
    peer.close()


async def test_closing_inside_a_handler_is_fine(router: PoolRouter, endpoint: str) -> None:
    closed = asyncio.Event()

    def on_message(_identity: bytes, _message: FromPool) -> None:
        router.close()
        closed.set()

    router.start(asyncio.get_running_loop(), on_message)
    peer = dealer(endpoint)
    await in_thread(peer.send, PipelineOpened(1))
    await in_thread(peer.send, PipelineOpened(2))
    await asyncio.wait_for(closed.wait(), LIMIT_S)
    peer.close()


LAST_WORDS = """
import sys
from shared.child import run_main
from shared.messages import FromPool, PipelineOpened, ToPool
from shared.transport import Dealer
def body():
    peer = Dealer(sys.argv[1], ToPool, identity=b"pool-0", generation=int(sys.argv[2]), high_water_mark=100)
    for number in range(100):
        peer.send(PipelineOpened(number))
    peer.close()
    return 0
run_main("test", body)
"""


async def test_what_a_process_sent_before_it_left_arrives(router: PoolRouter, inbox: Inbox, endpoint: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LAST_WORDS, endpoint, str(GENERATION))
    for number in range(100):
        assert (await inbox.next())[1] == PipelineOpened(number)
    assert await process.wait() == 0
