"""Generated text through the Open Inference Protocol: a real server over a fake flow, and Triton's own client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from protos.inference import grpc_service_pb2 as pb
from protos.inference import grpc_service_pb2_grpc as pb_grpc
from shared.errors import Overloaded
from shared.tensors import pack_bytes, unpack_bytes
from tests.support import own_process
from tests.support.fake_flow import VERSION, settings
from tests.support.fake_rest import HttpSite, serving_http
from tests.support.generation_players import text_model
from tests.support.open_inference_parts import Stack


def stack() -> Stack:
    made = Stack()
    made.models.served.append(text_model(9))
    return made


@asynccontextmanager
async def calling(made: Stack) -> AsyncIterator["pb_grpc.GRPCInferenceServiceAsyncStub"]:
    async with made.serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        yield pb_grpc.GRPCInferenceServiceStub(channel)


def asking(*texts: str, name: str = "text_input", **fields: Any) -> pb.ModelInferRequest:  # noqa: ANN401 - any field
    return pb.ModelInferRequest(
        model_name="writer",
        inputs=[pb.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[len(texts), 1])],
        raw_input_contents=[pack_bytes(text.encode() for text in texts)],
        **fields,
    )


def parts_of(answers: list[pb.ModelStreamInferResponse]) -> list[tuple[str, bool]]:
    return [
        (
            unpack_bytes(one.infer_response.raw_output_contents[0], 1)[0].decode(),
            one.infer_response.parameters["triton_final_response"].bool_param,
        )
        for one in answers
    ]


async def test_a_text_is_a_stream_of_answers_and_the_last_one_says_so() -> None:
    async with calling(stack()) as stub:
        sent = [asking("abc", id="7", parameters={"max_tokens": pb.InferParameter(int64_param=3)})]
        answers = [answer async for answer in stub.ModelStreamInfer(iter(sent))]
    assert parts_of(answers) == [("A", False), ("B", False), ("C", True)]
    last = answers[-1].infer_response
    assert (last.id, last.model_name, last.model_version) == ("7", "writer", VERSION)
    assert [(output.name, output.datatype, list(output.shape)) for output in last.outputs] == [
        ("text_output", "BYTES", [1, 1])
    ]
    assert last.parameters["finish_reason"].string_param == "length"
    assert last.parameters["completion_tokens"].int64_param == 3


async def test_options_are_parameters_and_lists_come_as_json_or_as_one() -> None:
    made = stack()
    given = {
        "temperature": pb.InferParameter(double_param=0.5),
        "stop": pb.InferParameter(string_param='["x", "y"]'),
        "stop_token_ids": pb.InferParameter(int64_param=7),
        "stream": pb.InferParameter(bool_param=True),
    }
    async with calling(made) as stub:
        _ = [answer async for answer in stub.ModelStreamInfer(iter([asking("a", parameters=given)]))]
        await stub.ModelInfer(asking("a", parameters={"stop": pb.InferParameter(string_param="[no list")}))
    options = [request.options for request in made.flow.requests]
    assert options == [{"temperature": 0.5, "stop": ["x", "y"], "stop_token_ids": [7]}, {"stop": ["[no list"]}]


async def test_a_unary_call_and_one_of_many_rows_get_whole_texts() -> None:
    async with calling(stack()) as stub:
        one = await stub.ModelInfer(asking("abc"))
        (many,) = [answer async for answer in stub.ModelStreamInfer(iter([asking("ab", "cd")]))]
    assert unpack_bytes(one.raw_output_contents[0], 1) == [b"ABC"]
    assert one.parameters["finish_reason"].string_param == "length"
    assert unpack_bytes(many.infer_response.raw_output_contents[0], 2) == [b"AB", b"CD"]


async def test_log_probabilities_are_a_parameter_of_the_answer() -> None:
    given = {"logprobs": pb.InferParameter(int64_param=0)}
    async with calling(stack()) as stub:
        answers = [answer async for answer in stub.ModelStreamInfer(iter([asking("ab", parameters=given)]))]
        whole = await stub.ModelInfer(asking("ab", parameters=given))
        with pytest.raises(grpc.aio.AioRpcError, match="logprobs is for requests of one text; this one has 2"):
            await stub.ModelInfer(asking("ab", "cd", parameters=given))
    parts = [json.loads(one.infer_response.parameters["logprobs"].string_param) for one in answers]
    assert [[token["id"] for token in part] for part in parts] == [[65], [66]]
    assert [token["text"] for token in json.loads(whole.parameters["logprobs"].string_param)] == ["A", "B"]


async def test_a_text_that_breaks_is_an_error_after_its_parts() -> None:
    made = stack()
    made.flow.breaks = "C"
    async with calling(made) as stub:
        answers = [answer async for answer in stub.ModelStreamInfer(iter([asking("abcd", id="7")]))]
    assert parts_of(answers[:2]) == [("A", False), ("B", False)]
    assert answers[2].error_message == "the worker was lost"
    assert answers[2].infer_response.id == "7"


async def test_a_drain_that_is_over_ends_a_text_with_an_error_and_the_stream() -> None:
    made = stack()
    made.flow.steps = asyncio.Queue()
    made.flow.steps.put_nowait(None)
    async with made.serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        answers = pb_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([asking("abc")]))
        assert parts_of([await anext(aiter(answers))]) == [("A", False)]
        await running.drain(0.0)
        assert "the server is stopping" in (await anext(aiter(answers))).error_message
        with pytest.raises(grpc.aio.AioRpcError, match="the server is stopping"):
            await anext(aiter(answers))


async def test_closing_the_stream_ends_the_text() -> None:
    made = stack()
    made.flow.steps = asyncio.Queue()
    made.flow.steps.put_nowait(None)
    async with calling(made) as stub:
        call = stub.ModelStreamInfer(iter([asking("abc")]))
        await call.read()
        call.cancel()
        await made.flow.until(lambda flow: flow.running == 0, "the flow to be told")


async def test_metadata_names_what_other_servers_name_so() -> None:
    async with calling(stack()) as stub:
        told = await stub.ModelMetadata(pb.ModelMetadataRequest(name="writer"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"takes 1 input\(s\) \(text_input\)"):
            await stub.ModelInfer(asking("a", name="text"))
    assert [(one.name, one.datatype, list(one.shape)) for one in told.inputs] == [("text_input", "BYTES", [-1, 1])]
    assert [one.name for one in told.outputs] == ["text_output"]


async def test_tritons_client_reads_along() -> None:
    async with stack().serving() as running:
        found = await asyncio.to_thread(own_process.run, "tests.support.triton_texts", "read_along", running.address)
    assert found == ["A", "B", "C"]


# ---------------------------------------------------------------- REST

GENERATE, STREAM = "/v2/models/writer/generate", "/v2/models/writer/generate_stream"


@asynccontextmanager
async def site() -> AsyncIterator[HttpSite]:
    async with serving_http(settings()) as made:
        made.stack.models.served.append(text_model(9))
        yield made


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_generate_answers_with_the_whole_text() -> None:
    async with site() as made:
        body = {"text_input": "abc", "id": "7", "parameters": {"max_tokens": 3, "stop": ["x", "y"], "seed": None}}
        answer = await made.client.post(GENERATE, json=body)
        (request,) = made.flow.requests
    assert answer.json() == {
        "id": "7",
        "model_name": "writer",
        "model_version": VERSION,
        "text_output": "ABC",
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 3,
    }
    assert request.options == {"max_tokens": 3, "stop": ["x", "y"]}
    assert answer.headers["request-id"] == "7"
    assert "server-timing" in answer.headers
    assert made.outcomes.counts == {("RestGenerate", "ok"): 1}


async def test_generate_stream_is_server_sent_events() -> None:
    async with site() as made:
        answer = await made.client.post(STREAM, json={"text_input": "abc"})
        events = events_of(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"]
    assert [event["text_output"] for event in events] == ["A", "B", "C"]
    assert ["finish_reason" in event for event in events] == [False, False, True]
    assert made.outcomes.counts == {("RestGenerateStream", "ok"): 1}


async def test_log_probabilities_come_beside_the_text() -> None:
    async with site() as made:
        body = {"text_input": "ab", "parameters": {"logprobs": 0, "stream": True}}
        whole = (await made.client.post(GENERATE, json=body)).json()
        events = events_of((await made.client.post(STREAM, json=body)).text)
    first, second = ({"id": ord(one), "text": one, "bytes": [ord(one)], "logprob": -0.5} for one in "AB")
    assert whole["logprobs"] == [first, second]
    assert [event["logprobs"] for event in events] == [[first], [second]]


async def test_events_come_while_the_text_grows() -> None:
    async with site() as made:
        made.flow.steps = asyncio.Queue()
        made.flow.steps.put_nowait(None)
        async with made.client.stream("POST", STREAM, json={"text_input": "ab"}) as answer:
            pieces = answer.aiter_text()
            assert events_of(await anext(pieces))[0]["text_output"] == "A"
            made.flow.steps.put_nowait(None)
            assert events_of(await anext(pieces))[0]["text_output"] == "B"


async def test_a_failure_before_the_first_event_is_a_status_and_after_it_an_event() -> None:
    async with site() as made:
        made.flow.fail = Overloaded("no room", retry_after_ms=40)
        refused = await made.client.post(STREAM, json={"text_input": "abc"})
        made.flow.fail, made.flow.breaks = None, "C"
        broken = await made.client.post(STREAM, json={"text_input": "abcd"})
    assert (refused.status_code, refused.json()) == (429, {"error": "no room"})
    assert refused.headers["retry-after-ms"] == "40"
    *_, last = events_of(broken.text)
    assert last == {"error": "the worker was lost", "reason": "process_lost"}
    assert made.outcomes.counts == {("RestGenerateStream", "overloaded"): 1, ("RestGenerateStream", "process_lost"): 1}


async def test_a_stop_that_cannot_wait_is_the_last_event() -> None:
    async with site() as made:
        made.flow.steps = asyncio.Queue()
        made.flow.steps.put_nowait(None)
        async with made.client.stream("POST", STREAM, json={"text_input": "ab"}) as answer:
            pieces = answer.aiter_text()
            assert events_of(await anext(pieces))[0]["text_output"] == "A"
            stopping = asyncio.create_task(made.stop())
            (last,) = [event async for piece in pieces for event in events_of(piece)]
            await stopping
    assert last == {"error": "the server is stopping and can't wait for this text", "reason": "draining"}
    assert made.outcomes.counts == {("RestGenerateStream", "draining"): 1}


async def test_closing_the_connection_ends_the_text() -> None:
    async with site() as made:
        made.flow.steps = asyncio.Queue()
        made.flow.steps.put_nowait(None)
        async with made.client.stream("POST", STREAM, json={"text_input": "ab"}) as answer:
            await anext(answer.aiter_text())
        await made.flow.until(lambda flow: flow.running == 0, "the flow to be told")


@pytest.mark.parametrize(
    ("path", "body", "code", "said"),
    [
        (GENERATE, {}, 400, "missing required field"),
        (GENERATE, {"text_input": ""}, 400, "text_input is empty"),
        (GENERATE, {"text_input": "a", "max_tokens": 5}, 400, "'max_tokens' is no field of the request, which has"),
        (STREAM, {"text_input": "a", "temperature": 1}, 400, "options belong in parameters"),
        (
            GENERATE,
            {"text_input": "a", "parameters": {"max_token": 5}},
            400,
            "parameter 'max_token' is unknown; known: max",
        ),
        (GENERATE, {"text_input": "a", "parameters": {"best_of": None}}, 400, "parameter 'best_of' is unknown"),
        (STREAM, {"text_input": 7}, 400, "expected `str`".replace("`", "'")),
        (STREAM, {"text_input": "a", "parameters": {"timeout": "x"}}, 400, "parameter 'timeout' is 'x'"),
        ("/v2/models/identity/generate", {"text_input": "a"}, 400, "model 'identity' generates no text"),
        ("/v2/models/nobody/generate_stream", {"text_input": "a"}, 404, "not served"),
    ],
)
async def test_what_is_wrong_is_said(path: str, body: dict[str, Any], code: int, said: str) -> None:
    async with site() as made:
        answer = await made.client.post(path, json=body)
    assert answer.status_code == code
    assert said in answer.json()["error"]
