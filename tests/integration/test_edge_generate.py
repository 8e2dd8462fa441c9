"""Texts that grow: both clients against the real gRPC server over a fake flow."""

import asyncio

import pytest

from gateway.request import Answer, Part, Request
from headrace import AsyncClient, Client
from headrace.client_errors import InvalidRequest, Unavailable
from headrace.client_tokens import Finished, Token
from shared import errors
from tests.support.fake_flow import VERSION, Flow, State, serving

LIMIT_S = 5.0


class Losing(Flow):
    """Loses its process for the first `failures` requests, after so many letters."""

    def __init__(self, failures: int, letters: int = 0) -> None:
        super().__init__()
        self.failures, self.letters = failures, letters

    async def answer(self, request: Request) -> Answer:
        self.failures -= 1
        if self.failures < 0:
            return await super().answer(request)
        if request.write is not None:
            for letter in "ABC"[: self.letters]:
                await request.write(Part("fake", VERSION, letter, [], None))
        raise errors.ProcessLost("the process was lost", retry_after_ms=1)


async def test_both_clients_read_along() -> None:
    async with serving(Flow(), State()) as running:

        def blocking() -> tuple[list[str], str, Finished | None]:
            with Client(running.address) as client:
                text = client.generate("abc", max_tokens=3)
                pieces = list(text)
                assert (text.model, text.version) == ("fake", VERSION)
                assert text.request_id
                assert text.server_timing.first_ms == 1.0
                return pieces, text.text, text.finished

        async with AsyncClient(running.address) as client:
            text = client.generate("abc", max_tokens=3)
            pieces = [piece async for piece in text]
            assert text.server_timing.first_ms == 1.0
        ended = Finished("length", 3, 3)
        assert (pieces, text.text, text.finished) == (["A", "B", "C"], "ABC", ended)
        assert await asyncio.to_thread(blocking) == (["A", "B", "C"], "ABC", ended)


async def test_whole_texts_with_log_probabilities_and_conversations() -> None:
    flow = Flow()
    async with serving(flow, State()) as running, AsyncClient(running.address) as client:
        text = await client.generate("ab", logprobs=0, stop=["x"], model="fake", routing_key="me").whole()
        assert text.tokens == [Token(65, b"A", -0.5), Token(66, b"B", -0.5)]
        (request,) = flow.requests
        assert (request.options, request.routing_key) == ({"logprobs": 0, "stop": ["x"]}, "me")
        await client.generate([{"role": "user", "content": "hi"}]).whole()
        assert flow.requests[1].inputs[0].data == b'[["user","hi"]]'


async def test_a_retry_happens_before_the_first_piece() -> None:
    async with serving(Losing(2), State()) as running:

        def blocking() -> str:
            with Client(running.address) as client:
                return client.generate("abc").whole().text

        assert await asyncio.to_thread(blocking) == "ABC"
    async with serving(Losing(2), State()) as running, AsyncClient(running.address) as client:
        assert (await client.generate("abc").whole()).text == "ABC"


@pytest.mark.parametrize("letters", [1, 2])
async def test_no_retry_happens_after_it(letters: int) -> None:
    async with serving(Losing(1, letters), State()) as running, AsyncClient(running.address) as client:
        text = client.generate("abc")
        with pytest.raises(Unavailable, match="the process was lost"):
            await text.whole()
        assert text.text == "ABC"[:letters]
    async with serving(Losing(1, letters), State()) as running:

        def blocking() -> str:
            with Client(running.address) as client:
                text = client.generate("abc")
                with pytest.raises(Unavailable):
                    text.whole()
                return text.text

        assert await asyncio.to_thread(blocking) == "ABC"[:letters]


async def test_leaving_early_ends_the_work() -> None:
    flow = Flow()
    flow.steps = asyncio.Queue()
    flow.steps.put_nowait(None)
    async with serving(flow, State()) as running, AsyncClient(running.address) as client:
        async with client.generate("abc") as text:
            assert await anext(text) == "A"
        await flow.until(lambda flow: flow.cancelled == 1, "the flow to be told")


async def test_a_blocking_reader_who_leaves_early_ends_the_work() -> None:
    flow = Flow()
    flow.steps = asyncio.Queue()
    flow.steps.put_nowait(None)
    async with serving(flow, State()) as running:

        def blocking() -> str:
            with Client(running.address) as client, client.generate("abc") as text:
                return next(text)

        assert await asyncio.to_thread(blocking) == "A"
        await flow.until(lambda flow: flow.cancelled == 1, "the flow to be told")


async def test_a_reader_who_does_not_read_is_held_up_by_flow_control_alone() -> None:
    flow = Flow()
    long = "x" * 3000
    async with serving(flow, State()) as running, AsyncClient(running.address) as client:
        unread = client.generate(long)
        read = await client.generate("abc").whole()
        assert read.text == "ABC"
        assert (await unread.whole()).text == long.upper()


async def test_a_drain_lets_texts_end() -> None:
    flow = Flow()
    flow.steps = asyncio.Queue()
    async with serving(flow, State()) as running, AsyncClient(running.address, max_attempts=1) as client:
        reading = asyncio.create_task(client.generate("abc").whole())
        await flow.until(lambda flow: flow.running == 1, "the text to begin")
        draining = asyncio.create_task(running.drain(LIMIT_S))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await client.generate("late").whole()
        for _ in range(3):
            flow.steps.put_nowait(None)
        assert (await reading).text == "ABC"
        await draining


async def test_a_drain_that_is_over_ends_texts_with_a_reason_after_what_has_grown() -> None:
    flow = Flow()
    flow.steps = asyncio.Queue()
    flow.steps.put_nowait(None)
    async with serving(flow, State()) as running, AsyncClient(running.address, max_attempts=1) as client:
        text = client.generate("abc")
        assert await anext(text) == "A"
        await running.drain(0.0)
        with pytest.raises(Unavailable, match="the server is stopping and can't wait for the rest of this call"):
            await anext(text)
        assert text.text == "A"


async def test_a_wrong_option_of_the_contract_never_leaves() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="no_such"):
            client.generate("abc", no_such=1)  # type: ignore[call-arg]


async def test_a_refusal_is_the_clients_exception() -> None:
    flow = Flow()
    flow.fail = errors.InvalidInput("the prompt has 9 tokens; the model's context is 8 tokens")
    async with serving(flow, State()) as running, AsyncClient(running.address) as client:
        with pytest.raises(InvalidRequest, match="the prompt has 9 tokens"):
            await client.generate("abc").whole()
