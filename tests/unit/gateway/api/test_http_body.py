import asyncio
import gzip
from typing import Any

import pytest
from fastapi import Request

from gateway.api.http_body import Bodies
from shared.clock import FOREVER_S, now_s
from shared.errors import Cancelled, DeadlineExceeded, InvalidInput, Overloaded, TooLarge
from tests.support.fake_flow import settings

LIMIT = 1000


def bodies(admitted: int = LIMIT) -> Bodies:
    return Bodies(settings(gateway={"max_message_bytes": LIMIT}, admission={"max_bytes": admitted}))


def request(*chunks: bytes | None, **headers: str) -> Request:
    """A request whose body comes in these chunks; None is a caller that leaves."""
    left = list(chunks)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()  # never comes
        chunk = left.pop(0)
        if chunk is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk, "more_body": chunk != b""}

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": named}, receive)


async def read(these: Bodies, given: Request, deadline_s: float = FOREVER_S) -> bytes:
    with these.open(given, deadline_s) as body:
        return await body.read()


async def test_chunks_are_joined_and_their_memory_is_given_back() -> None:
    these = bodies()
    with these.open(request(b"ab", b"c", b""), FOREVER_S) as body:
        assert await body.read() == b"abc"
        assert these.held == 3

    assert these.held == 0


async def test_a_body_over_the_limit_is_refused_when_it_is_declared_or_as_soon_as_it_is_seen() -> None:
    these = bodies()
    with pytest.raises(TooLarge, match=r"1001 bytes or more; the limit is 1000 \(gateway.max_message_bytes\)"):
        await read(these, request(content_length="1001"))
    with pytest.raises(TooLarge, match="1200 bytes or more"):
        await read(these, request(*[b"x" * 600] * 50))

    assert these.held == 0
    assert await read(these, request(b"x" * LIMIT, b"", content_length=str(LIMIT))) == b"x" * LIMIT


async def test_all_bodies_together_have_a_limit_and_room_comes_back() -> None:
    these = bodies()
    with (
        these.open(request(b"x" * LIMIT, b""), FOREVER_S) as first,
        these.open(request(b"x", b""), FOREVER_S) as second,
    ):
        await first.read()
        await second.read()
        with pytest.raises(Overloaded, match="1001 bytes; the limit is 2000"):
            await read(these, request(b"x" * LIMIT, b""))
        assert these.held == LIMIT + 1

    assert len(await read(these, request(b"x" * LIMIT, b""))) == LIMIT


async def test_a_caller_that_leaves_or_is_late_ends_the_reading() -> None:
    these = bodies()
    with pytest.raises(Cancelled):
        await read(these, request(b"x", None))
    with pytest.raises(DeadlineExceeded, match=r"1 bytes came \(gateway.default_deadline_ms\)"):
        await read(these, request(b"x"), now_s() + 0.01)
    with pytest.raises(DeadlineExceeded, match="0 bytes came"):
        async with asyncio.timeout(5):
            await read(these, request(content_length="100"), now_s() + 0.01)

    assert these.held == 0


async def test_an_unpacked_body_counts_with_its_own_size() -> None:
    these = bodies()
    packed = gzip.compress(b"x" * 900)
    with these.open(request(packed, b"", content_encoding=" GZip"), FOREVER_S) as body:
        assert len(await body.read()) == 900
        assert these.held == 900
    with pytest.raises(TooLarge, match="unpacked body has more than 1000 bytes"):
        await read(these, request(gzip.compress(b"x" * 1001), b"", content_encoding="gzip"))

    assert these.held == 0


@pytest.mark.parametrize(
    ("body", "encoding", "sentence"),
    [
        (gzip.compress(b"x", mtime=0)[:-1], "gzip", "cut short"),
        (gzip.compress(b"x", mtime=0) + b"y", "gzip", "followed by other bytes"),
        (b"not packed", "deflate", "can't be unpacked"),
        (b"x", "br", "Content-Encoding is 'br'; known: identity, gzip, deflate"),
        (b"x", "gzip, gzip", "Content-Encoding is 'gzip, gzip'"),
    ],
)
async def test_what_cant_be_unpacked_is_an_invalid_input(body: bytes, encoding: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        await read(bodies(), request(body, b"", content_encoding=encoding))
