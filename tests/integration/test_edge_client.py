"""Both clients against the real gRPC server over a fake flow."""

import asyncio
import collections
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.request import Answer, Request
from headrace import AsyncClient, Client
from headrace.client_errors import DeadlineExceeded, InferenceError, Overloaded, TooLarge, Unavailable
from headrace.client_results import Classification, Embedded, File, Outcome, Recognised, Text
from shared import errors, results
from shared.results import Embedding, Entities, Entity, Label
from tests.support.fake_flow import Flow, State, serving, settings


class Flaky(Flow):
    """Loses its process for the first `failures` requests."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    async def answer(self, request: Request) -> Answer:
        self.failures -= 1
        if self.failures >= 0:
            raise errors.ProcessLost("the process was lost", retry_after_ms=1)
        return await super().answer(request)


def images(tmp_path: Path, count: int) -> list[Path]:
    files = [tmp_path / f"{number}.jpg" for number in range(count)]
    for file in files:
        file.write_bytes(file.name.encode())
    return files


async def test_classify_in_both_forms(tmp_path: Path) -> None:
    (file,) = images(tmp_path, 1)
    async with serving(Flow(), State()) as running:

        def blocking() -> object:
            with Client(running.address) as client:
                return client.classify(file, top_k=3).labels

        async with AsyncClient(running.address) as client:
            answer = await client.classify(str(file), top_k=3)
        labels = await asyncio.to_thread(blocking)

    assert labels == answer.labels
    assert [label.name for label in answer.labels] == ["label 0", "label 1", "label 2"]
    assert answer.server_timing.run_ms == 2.0
    assert answer.request_id


async def test_a_request_without_a_model_says_its_task_in_both_forms() -> None:
    flow = Flow()
    flow.fail = errors.InvalidInput("no")
    given: list[Any] = [b"image", Text("text"), File(b"file")]
    told = ["image_classification", "text_classification", "file_classification"] * 2
    told += ["object_detection", "text_embedding", "token_classification", "object_detection", "text_embedding", ""]
    async with serving(flow, State()) as running:

        def blocking() -> None:
            with Client(running.address) as client:
                calls = [*(functools.partial(client.classify, one) for one in given)]
                calls += [lambda one=one: list(client.classify_many([one])) for one in given]
                calls += [functools.partial(client.detect, b"x"), functools.partial(client.embed, "x")]
                calls += [functools.partial(client.entities, "x"), lambda: list(client.detect_many([b"x"]))]
                calls += [lambda: list(client.embed_many(["x"])), functools.partial(client.predict, [b"x"])]
                for call in calls:
                    with contextlib.suppress(InferenceError):
                        call()

        await asyncio.to_thread(blocking)
        assert [request.task for request in flow.requests] == told
        flow.requests.clear()
        async with AsyncClient(running.address) as client:
            for one in given:
                with contextlib.suppress(InferenceError):
                    await client.classify(one)
            for one in given:
                assert [outcome.result async for outcome in client.classify_many([one])] == [None]
            for call in (client.detect(b"x"), client.embed("x"), client.entities("x")):
                with contextlib.suppress(InferenceError):
                    await call
            assert [outcome.result async for outcome in client.detect_many([b"x"])] == [None]
            assert [outcome.result async for outcome in client.embed_many(["x"])] == [None]
            with contextlib.suppress(InferenceError):
                await client.predict([b"x"])
        assert [request.task for request in flow.requests] == told


async def test_predict_many_inputs_with_partial_results() -> None:
    flow = Flow()
    flow.results = [errors.InvalidInput("inputs[0] is no image"), *[]]
    async with serving(flow, State()) as running, AsyncClient(running.address) as client:
        flow.results = None
        whole = await client.predict([b"a", b"b"], model="fake", options={"top_k": 1})
        flow.results = [errors.InvalidInput("inputs[0] is no image")]
        part = await client.predict([b"a"], partial_results=True)

    assert [type(one) for one in whole.results] == [Classification, Classification]
    assert isinstance(part.results[0], InferenceError)
    assert part.results[0].reason == "invalid_input"


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_lost_process_is_survived_by_a_retry(failures: int) -> None:
    async with serving(Flaky(failures), State()) as running:

        def blocking() -> str:
            with Client(running.address) as client:
                return client.classify(b"x").top.name

        assert await asyncio.to_thread(blocking) == "label 0"
        assert running.outcomes.counts == {("Predict", "process_lost"): failures, ("Predict", "ok"): 1}


async def test_the_asyncio_client_retries_too_and_gives_up_after_four_attempts() -> None:
    async with serving(Flaky(5), State()) as running, AsyncClient(running.address) as client:
        with pytest.raises(Unavailable) as caught:
            await client.classify(b"x")
        assert running.outcomes.counts == {("Predict", "process_lost"): 4}
        assert (await client.classify(b"x")).labels

    assert (caught.value.reason, caught.value.retry_after_ms) == ("process_lost", 1)


async def test_overload_is_told_and_not_retried() -> None:
    flow = Flow()
    flow.fail = errors.Overloaded("no room", retry_after_ms=9)
    async with serving(flow, State()) as running, AsyncClient(running.address) as client:
        with pytest.raises(Overloaded, match="no room") as caught:
            await client.classify(b"x")

    assert caught.value.retry_after_ms == 9
    assert len(flow.requests) == 1


async def test_the_time_limit_is_the_calls_deadline() -> None:
    flow = Flow()
    flow.gate = asyncio.Event()
    async with serving(flow, State()) as running, AsyncClient(running.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.classify(b"x", timeout_s=0.05)
        await flow.until(lambda one: one.cancelled == 1, "the late work to be cancelled")


async def test_nobody_there_is_unreachable_at_once() -> None:
    async with serving(Flow(), State()) as running:
        address = running.address
    async with AsyncClient(address) as client:
        with pytest.raises(Unavailable, match="no server answers") as caught:
            await client.classify(b"x", timeout_s=20)

    assert caught.value.reason == "unreachable"


async def test_a_file_over_the_servers_limit_is_too_large() -> None:
    chosen = settings(gateway={"max_message_bytes": 1000})
    async with serving(Flow(), State(), chosen) as running, AsyncClient(running.address) as client:
        for size in (2000, 2_000_000):
            with pytest.raises(TooLarge, match=r"gateway\.max_message_bytes"):
                await client.classify(bytes(size))


async def test_many_files_each_get_one_outcome_in_both_forms(tmp_path: Path) -> None:
    given = [*images(tmp_path, 40), tmp_path / "missing.jpg", b""]
    async with serving(Flow(), State()) as running:

        def blocking() -> list[Outcome]:
            with Client(running.address) as client:
                return list(client.classify_many(given, top_k=1, in_flight=4))

        async with AsyncClient(running.address) as client:
            mine = [outcome async for outcome in client.classify_many(given, top_k=1, in_flight=4)]
        for outcomes in (mine, await asyncio.to_thread(blocking)):
            assert sorted(outcome.index for outcome in outcomes) == list(range(42))
            kinds = collections.Counter(type(outcome.error).__name__ for outcome in outcomes)
            assert kinds == {"NoneType": 40, "FileNotFoundError": 1, "InvalidRequest": 1}
            assert all(outcome.given is given[outcome.index] for outcome in outcomes)


async def test_leaving_the_loop_early_drops_the_rest() -> None:
    flow = Flow()
    flow.gate = asyncio.Event()
    flow.gate.set()
    async with serving(flow, State()) as running:

        def blocking() -> int:
            with Client(running.address) as client:
                for outcome in client.classify_many([b"x"] * 1000, in_flight=4):
                    return outcome.index
            return -1

        async with AsyncClient(running.address) as client:
            many = client.classify_many([b"x"] * 1000, in_flight=4)
            assert (await anext(many)).result
            await many.aclose()  # type: ignore[attr-defined]  # an async generator, declared as its iterator
        assert await asyncio.to_thread(blocking) >= 0
        assert await running.outcomes.wait_idle(5), "waited 5 s for the server to drop both streams"

    assert len(flow.requests) < 1000


async def test_what_the_callers_own_images_raise_comes_out() -> None:
    async with serving(Flow(), State()) as running:

        def blocking() -> None:
            with Client(running.address) as client:
                list(client.classify_many([b"x", 17]))  # type: ignore[list-item]  # what is tested

        with pytest.raises(TypeError, match="int"):
            await asyncio.to_thread(blocking)
        async with AsyncClient(running.address) as client:
            with pytest.raises(TypeError, match="int"):
                async for _ in client.classify_many([b"x", 17]):  # type: ignore[list-item]  # what is tested
                    pass


LABEL = Label(1, "PER", 0.9)


@pytest.mark.parametrize(
    ("result", "call", "asked"),
    [
        (
            Embedding([0.5, 0.25], 7, truncated=True),
            lambda client: client.embed("Anna", truncate=True, normalize=False),
            {"truncate": True, "normalize": False},
        ),
        (
            Entities([Entity(LABEL, 0, 4, "Anna")], truncated=True),
            lambda client: client.entities("Anna", score_threshold=0.5),
            {"score_threshold": 0.5},
        ),
        (
            results.Classification([LABEL]),
            lambda client: client.classify(Text("Anna"), score_threshold=0.25, top_k=2),
            {"top_k": 2, "score_threshold": 0.25},
        ),
    ],
)
async def test_texts_go_as_texts_in_both_forms(
    result: results.Result, call: Callable[[Any], Any], asked: dict[str, object]
) -> None:
    flow = Flow()
    flow.results = [result]
    async with serving(flow, State()) as running:

        def blocking() -> object:
            with Client(running.address) as client:
                return call(client)

        async with AsyncClient(running.address) as client:
            answers: list[Any] = [await call(client), await asyncio.to_thread(blocking)]
    for request in flow.requests:
        assert (request.inputs[0].kind, bytes(request.inputs[0].data)) == ("text", b"Anna")
        assert request.options == asked
    for answer in answers:
        if isinstance(answer, Embedded):
            assert (answer.values, answer.tokens, answer.truncated) == ((0.5, 0.25), 7, True)
        elif isinstance(answer, Recognised):
            assert [(one.text, one.start, one.end, one.label.name) for one in answer.entities] == [
                ("Anna", 0, 4, "PER")
            ]
            assert answer.truncated
        else:
            assert [label.name for label in answer.labels] == ["PER"]
    assert type(answers[0]) is type(answers[1])


async def test_many_texts_go_over_one_stream() -> None:
    flow = Flow()
    flow.results = [Embedding([1.0], 3)]
    async with serving(flow, State()) as running:

        def blocking() -> list[Outcome[Embedded]]:
            with Client(running.address) as client:
                return list(client.embed_many("abc"))

        async with AsyncClient(running.address) as client:
            found = [outcome async for outcome in client.embed_many("abc")]
        found += await asyncio.to_thread(blocking)
    assert sorted(str(outcome.given) for outcome in found) == ["a", "a", "b", "b", "c", "c"]
    assert {outcome.result.tokens for outcome in found if outcome.result} == {3}
