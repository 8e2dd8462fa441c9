"""The Open Inference Protocol's REST form and the plain upload: the real HTTP server over a flow without processes."""

import asyncio
import gzip
import os
import re
import struct
import zlib
from collections.abc import AsyncIterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from shared.errors import Draining, InvalidOption, NonfiniteOutput, NotReady, Overloaded, ProcessLost
from tests.support.fake_flow import VERSION, settings
from tests.support.fake_rest import HttpSite, serving_http
from tests.support.open_inference_parts import Echo

ROW = np.arange(16, dtype="<f4").reshape(1, 16)
IDENTITY = "/v2/models/identity/infer"


def tensor(array: Any, name: str = "INPUT0", datatype: str = "FP32") -> dict[str, Any]:  # noqa: ANN401 - an array
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.tolist()}


BODY = {"inputs": [tensor(ROW)]}


GATEWAY = {"max_message_bytes": 1024 * 1024, "system_shared_memory_prefix": "headrace-test-"}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[HttpSite]:
    """One server for all tests: stopping one takes a while."""
    async with serving_http(settings(gateway=GATEWAY)) as site:
        yield site


@pytest.fixture
def site(server: HttpSite) -> HttpSite:
    server.reset()
    return server


@pytest.fixture
def flow(site: HttpSite) -> Echo:
    return site.flow


async def works(site: HttpSite) -> bool:
    """Whether the next request on the same connection is fine."""
    return (await site.client.post(IDENTITY, json=BODY)).status_code == 200


async def test_json_in_and_out_with_id_timing_and_request_id(site: HttpSite) -> None:
    answer = await site.client.post(IDENTITY, json=BODY | {"id": "é7"})

    assert answer.json() == {
        "model_name": "identity",
        "model_version": VERSION,
        "id": "é7",
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 16], "data": ROW.reshape(-1).tolist()}],
    }
    assert answer.headers["content-type"] == "application/json"
    assert "run;dur=2.000" in answer.headers["server-timing"]
    assert len(answer.headers["request-id"]) == 16  # the id can't stand in a header
    assert site.outcomes.counts == {("RestInfer", "ok"): 1}
    assert site.outcomes.in_flight == 0


async def test_an_id_that_can_stand_in_a_header_is_the_request_id(site: HttpSite, flow: Echo) -> None:
    answer = await site.client.post(f"/v2/models/identity/versions/{VERSION}/infer", json=BODY | {"id": "mine"})

    assert answer.headers["request-id"] == "mine"
    assert flow.requests[0].request_id == "mine"
    assert flow.requests[0].version == VERSION


async def test_binary_in_and_out(site: HttpSite) -> None:
    asked = {
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}],
        "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
    }
    text = msgspec.json.encode(asked)
    answer = await site.client.post(
        IDENTITY, content=text + ROW.tobytes(), headers={"Inference-Header-Content-Length": str(len(text))}
    )

    length = int(answer.headers["inference-header-content-length"])
    told = msgspec.json.decode(answer.content[:length])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.content[length:] == ROW.tobytes()
    assert told["outputs"] == [
        {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
    ]


async def test_half_precision_goes_in_and_out_in_binary_only(site: HttpSite) -> None:
    text = msgspec.json.encode(
        {"inputs": [{"name": "INPUT0", "datatype": "FP16", "shape": [1, 2], "parameters": {"binary_data_size": 4}}]}
    )
    headers = {"Inference-Header-Content-Length": str(len(text))}
    refused = await site.client.post("/v2/models/half/infer", content=text + b"abcd", headers=headers)
    wish = b'{"parameters":{"binary_data_output":true},' + text[1:]
    headers = {"Inference-Header-Content-Length": str(len(wish))}
    fine = await site.client.post("/v2/models/half/infer", content=wish + b"abcd", headers=headers)

    assert (refused.status_code, fine.status_code) == (400, 200)
    assert "output 'OUTPUT0' is FP16, which JSON can't carry" in refused.json()["error"]
    assert fine.content.endswith(b"}abcd")


async def test_texts_as_json_strings(site: HttpSite) -> None:
    given = {"name": "INPUT0", "datatype": "BYTES", "shape": [2, 1], "data": [["a"], ["ü\n"]]}
    answer = await site.client.post("/v2/models/bytes/infer", json={"inputs": [given]})

    assert answer.json()["outputs"][0]["data"] == ["a", "ü\n"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the request has no JSON"),
        (b"{]", "the request body is not JSON"),
        (b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,1],"data":[NaN]}]}', "not JSON"),
        (b'{"inputs":[],"x":' + b"[" * 200_000, "nested too deeply"),
        (b'{"inputs":[]}', "takes 1 input"),
        ({"inputs": [tensor(ROW), tensor(ROW)]}, "input 'INPUT0' is given twice"),
        ({"inputs": [tensor(ROW, name="x")]}, "takes 1 input.*'x'"),
        ({"inputs": [tensor(ROW, datatype="FP64")]}, "datatype 'FP64'; model 'identity' takes FP32"),
        ({"inputs": [tensor(ROW[:, :15])]}, r"shape \[1, 15\]; model 'identity' takes \[-1, 16\]"),
        ({"inputs": [tensor(ROW) | {"shape": [2**63, 16]}]}, "1 entries at depth 0 .*needs 9223372036854775808"),
        (BODY | {"outputs": [{"name": "z"}]}, "output 'z' is not one of model 'identity'"),
        (BODY | {"parameters": {"timeout": -1}}, "parameter 'timeout'"),
        (BODY | {"parameters": {"triton_x": 1}}, "parameter 'triton_x'"),
    ],
)
async def test_a_bad_request_is_400_with_the_reason_and_the_next_one_works(
    site: HttpSite, content: bytes | dict[str, Any], sentence: str
) -> None:
    raw = content if isinstance(content, bytes) else msgspec.json.encode(content)
    answer = await site.client.post(IDENTITY, content=raw)

    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert re.search(sentence, answer.json()["error"])
    assert answer.headers["error-reason"] == "invalid_input"
    assert "request-id" in answer.headers
    assert await works(site)


@pytest.mark.parametrize("header", ["-1", "99999", "1e2", "9" * 30])
async def test_a_header_length_that_is_none_is_400(site: HttpSite, header: str) -> None:
    answer = await site.client.post(IDENTITY, json=BODY, headers={"Inference-Header-Content-Length": header})

    assert answer.status_code == 400
    assert "Inference-Header-Content-Length" in answer.json()["error"]
    assert await works(site)


async def test_a_form_at_infer_is_400_and_says_where_forms_go(site: HttpSite) -> None:
    answer = await site.client.post(IDENTITY, files={"file": b"x"})

    assert (answer.status_code, "/v1/classify" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("error", "code", "retry"),
    [
        (Overloaded("full", retry_after_ms=1200), 429, "2"),
        (NotReady("no"), 503, "1"),
        (ProcessLost("no"), 503, "1"),
        (Draining("no"), 503, "1"),
        (InvalidOption("no"), 400, None),
        (NonfiniteOutput("no"), 422, None),
    ],
)
async def test_a_failure_of_the_flow_has_its_status_and_pushback(
    site: HttpSite, flow: Echo, error: Exception, code: int, retry: str | None
) -> None:
    flow.fail = error
    answer = await site.client.post(IDENTITY, json=BODY)

    assert (answer.status_code, answer.headers.get("retry-after")) == (code, retry)
    assert "server-timing" in answer.headers


async def test_a_bug_of_ours_is_500_with_fixed_text(site: HttpSite, flow: Echo) -> None:
    flow.fail = RuntimeError("a secret")
    answer = await site.client.post(IDENTITY, json=BODY)

    assert answer.status_code == 500
    assert answer.json() == {"error": "internal error; the request id finds it in the server's log"}
    assert site.outcomes.counts == {("RestInfer", "internal"): 1}


@pytest.mark.parametrize("suffix", ["", "/ready", "/config", "/stats"])
async def test_an_unknown_model_or_version_is_404_everywhere(site: HttpSite, suffix: str) -> None:
    unknown = await site.client.get(f"/v2/models/nobody{suffix}")
    version = await site.client.get(f"/v2/models/identity/versions/fedcba9876543210{suffix}")

    assert (unknown.status_code, version.status_code) == (404, 404)
    assert unknown.json() == {"error": "model 'nobody' is not served"}
    assert version.headers["error-reason"] == "unknown_version"


async def test_an_unknown_model_is_refused_before_its_body_is_read(site: HttpSite) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x"
        raise AssertionError("nobody should have read on")

    head = b"POST /v2/models/nobody/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    reader, writer = await asyncio.open_connection(*site.address.split(":"))
    writer.write(head)  # and not one byte of the body
    status = await asyncio.wait_for(reader.readline(), 5)
    writer.close()

    assert status == b"HTTP/1.1 404 Not Found\r\n"


async def test_a_declared_length_over_the_limit_is_413_before_the_body_is_read(site: HttpSite) -> None:
    head = f"POST {IDENTITY} HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(*site.address.split(":"))
    writer.write(head)
    status = await asyncio.wait_for(reader.readline(), 5)
    writer.close()

    assert status.startswith(b"HTTP/1.1 413 ")


async def test_a_chunked_body_is_read_and_one_over_the_limit_is_413_on_the_way(site: HttpSite, flow: Echo) -> None:
    text = msgspec.json.encode(BODY)
    sent = 0

    async def small() -> AsyncIterator[bytes]:
        for place in range(0, len(text), 7):
            yield text[place : place + 7]

    async def large() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(40):
            sent += 64 * 1024
            yield bytes(64 * 1024)

    fine = await site.client.post(IDENTITY, content=small())
    refused = await site.client.post(IDENTITY, content=large())

    assert fine.status_code == 200
    assert refused.status_code == 413
    assert "gateway.max_message_bytes" in refused.json()["error"]
    assert len(flow.requests) == 1
    assert await works(site)


async def test_compressed_bodies_are_unpacked_within_the_limit(site: HttpSite) -> None:
    text = msgspec.json.encode(BODY)
    bomb = gzip.compress(bytes(50_000_000))

    packed = await site.client.post(IDENTITY, content=gzip.compress(text), headers={"Content-Encoding": "gzip"})
    deflated = await site.client.post(IDENTITY, content=zlib.compress(text), headers={"Content-Encoding": "deflate"})
    cut = await site.client.post(IDENTITY, content=gzip.compress(text)[:-9], headers={"Content-Encoding": "gzip"})
    wrong = await site.client.post(IDENTITY, content=text, headers={"Content-Encoding": "gzip"})
    foreign = await site.client.post(IDENTITY, content=text, headers={"Content-Encoding": "br"})
    bombed = await site.client.post(IDENTITY, content=bomb, headers={"Content-Encoding": "gzip"})

    assert [packed.status_code, deflated.status_code] == [200, 200]
    assert [cut.status_code, wrong.status_code, foreign.status_code, bombed.status_code] == [400, 400, 400, 413]


async def test_a_slow_body_ends_with_the_deadline() -> None:
    async with serving_http(settings(gateway={"default_deadline_ms": 50})) as site:
        reader, writer = await asyncio.open_connection(*site.address.split(":"))
        writer.write(f"POST {IDENTITY} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        status = await asyncio.wait_for(reader.readline(), 5)
        writer.close()

    assert status.startswith(b"HTTP/1.1 504 ")


async def test_a_caller_that_leaves_cancels_its_work(site: HttpSite, flow: Echo) -> None:
    flow.gate = asyncio.Event()
    text = msgspec.json.encode(BODY)
    reader, writer = await asyncio.open_connection(*site.address.split(":"))
    writer.write(f"POST {IDENTITY} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
    await flow.until(lambda one: one.running == 1, "the request to reach the flow")
    writer.close()
    await flow.until(lambda one: one.cancelled == 1, "the work to be cancelled")
    assert await site.outcomes.wait_idle(5)

    assert site.outcomes.counts == {("RestInfer", "cancelled"): 1}
    flow.gate.set()
    assert await works(site)
    del reader


async def test_a_stop_that_cant_wait_longer_answers_503_to_what_is_left() -> None:
    async with serving_http() as site:
        site.flow.gate = asyncio.Event()
        call = asyncio.create_task(site.client.post(IDENTITY, json=BODY))
        await site.flow.until(lambda one: one.running == 1, "the request to reach the flow")
        await site.stop()
        answer = await call

        assert (answer.status_code, answer.headers["error-reason"]) == (503, "draining")
        assert site.outcomes.counts == {("RestInfer", "draining"): 1}
        assert site.flow.cancelled == 1


async def test_requests_sent_one_behind_the_other_are_answered_in_order(site: HttpSite) -> None:
    texts = [msgspec.json.encode(BODY | {"id": str(number)}) for number in range(5)]
    head = f"POST {IDENTITY} HTTP/1.1\r\nHost: x\r\nContent-Length: {{}}\r\n\r\n"
    reader, writer = await asyncio.open_connection(*site.address.split(":"))
    writer.write(b"".join(head.format(len(text)).encode() + text for text in texts))
    for number in range(5):
        answer = await asyncio.wait_for(reader.readuntil(b"]}]}"), 5)
        assert answer.count(f'"id":"{number}"'.encode()) == 1
    writer.close()


async def test_a_caller_that_leaves_in_the_middle_of_its_body_is_forgotten(site: HttpSite, flow: Echo) -> None:
    _, writer = await asyncio.open_connection(*site.address.split(":"))
    writer.write(f"POST {IDENTITY} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert await works(site)
    assert await site.outcomes.wait_idle(5)

    assert len(flow.requests) == 1


@pytest.mark.parametrize(
    ("parameters", "seconds"),
    [({}, 10), ({"timeout": 60_000_000}, 60), ({"timeout": 5000}, 0.005), ({"timeout": 0}, 10)],
)
async def test_the_deadline_is_the_default_or_the_timeout_parameter(
    site: HttpSite, flow: Echo, parameters: dict[str, int], seconds: float
) -> None:
    await site.client.post(IDENTITY, json=BODY | {"parameters": parameters})

    request = flow.requests[0]
    assert request.deadline_s - request.arrived_s == pytest.approx(seconds)


async def test_health(site: HttpSite) -> None:
    paths = ["/v2/health/live", "/v2/health/ready", "/v2/models/identity/ready"]

    assert [(await site.client.get(path)).json() for path in paths] == [
        {"live": True},
        {"ready": True},
        {"name": "identity", "ready": True},
    ]


async def test_facts_are_those_of_the_grpc_form_with_numbers_as_numbers(site: HttpSite) -> None:
    server = (await site.client.get("/v2")).json()
    model = (await site.client.get(f"/v2/models/identity/versions/{VERSION}")).json()
    config = (await site.client.get("/v2/models/identity/config")).json()

    assert server["name"] == "headrace"
    assert {"binary_tensor_data", "statistics"} <= set(server["extensions"])
    assert model == {
        "name": "identity",
        "versions": [VERSION],
        "platform": "headrace_tensors",
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 16]}],
    }
    assert (config["max_batch_size"], config["input"][0]["data_type"]) == (8, "TYPE_FP32")
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 2000


async def test_statistics_of_one_model_and_of_all_count_what_the_codec_refuses(site: HttpSite) -> None:
    before = (await site.client.get("/v2/models/pair/stats")).json()["model_stats"]
    await site.client.post("/v2/models/pair/infer", content=b"{")
    after = (await site.client.get("/v2/models/pair/stats")).json()["model_stats"]
    everything = (await site.client.get("/v2/models/stats")).json()["model_stats"]

    versioned = (await site.client.get(f"/v2/models/pair/versions/{VERSION}/stats")).json()["model_stats"]

    assert [model["name"] for model in after] == ["pair"]
    assert int(after[0]["version"]) > 0  # load generators read it as a number
    assert versioned[0]["version"] == VERSION
    assert after[0]["inference_stats"]["fail"]["count"] == before[0]["inference_stats"]["fail"]["count"] + 1
    assert after[0]["inference_stats"]["cache_hit"] == {"count": 0, "ns": 0}
    assert len(everything) == 7


async def test_what_is_not_ready_says_so_with_503(site: HttpSite) -> None:
    site.stack.state.set_reason("model 'identity' is not ready: loading")
    site.phase("identity", "loading")

    server = await site.client.get("/v2/health/ready")
    model = await site.client.get("/v2/models/identity/ready")

    assert [server.status_code, model.status_code] == [503, 503]
    assert server.json() == {"error": "model 'identity' is not ready: loading"}
    assert "a test said so" in model.json()["error"]


async def test_the_repository_is_listed_and_not_changed_unless_allowed(site: HttpSite) -> None:
    site.phase("classifier", "failed")
    everything = await site.client.post("/v2/repository/index")
    ready = await site.client.post("/v2/repository/index", json={"ready": True})
    wrong = await site.client.post("/v2/repository/index", json={"ready": 3})
    load = await site.client.post("/v2/repository/models/classifier/load")
    unload = await site.client.post("/v2/repository/models/classifier/unload")

    assert [len(everything.json()), len(ready.json())] == [6, 5]
    assert everything.json()[4]["state"] == "UNAVAILABLE"
    assert everything.json()[4]["reason"] == "a test said so"
    assert [wrong.status_code, load.status_code, unload.status_code] == [400, 501, 501]
    assert "gateway.repository_control" in load.json()["error"]


async def test_unknown_paths_and_methods_are_json_errors(site: HttpSite) -> None:
    path = await site.client.get("/v3")
    method = await site.client.get(IDENTITY)

    assert (path.status_code, path.json()) == (404, {"error": "Not Found"})
    assert (method.status_code, method.json()) == (405, {"error": "Method Not Allowed"})


async def test_a_load_with_parameters_is_refused_as_nothing_that_works_here(site: HttpSite) -> None:
    answer = await site.client.post("/v2/repository/models/identity/load", json={"parameters": {"config": "{}"}})

    assert (answer.status_code, "load takes no parameters" in answer.json()["error"]) == (501, True)


async def test_tensors_in_shared_memory(site: HttpSite) -> None:
    memory = SharedMemory(f"headrace-test-{os.getpid()}", create=True, size=128)
    try:
        memory.buf[:64] = ROW.tobytes()
        region = "/v2/systemsharedmemory/region/r"
        described = {"key": memory.name, "offset": 0, "byte_size": 128}
        registered = await site.client.post(f"{region}/register", json=described)
        status = (await site.client.get(f"{region}/status")).json()
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 64}
        asked = {
            "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "parameters": place}],
            "outputs": [{"name": "OUTPUT0", "parameters": place | {"shared_memory_offset": 64}}],
        }
        answer = await site.client.post(IDENTITY, json=asked)
        written = bytes(memory.buf[64:128])
        removed = await site.client.post("/v2/systemsharedmemory/unregister")
        gone = await site.client.post(IDENTITY, json=asked)
    finally:
        memory.close()
        memory.unlink()

    assert [registered.status_code, removed.status_code] == [200, 200]
    assert status == [{"name": "r", **described}]
    assert answer.json()["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 16]}]
    assert written == ROW.tobytes()
    assert (gone.status_code, gone.headers["error-reason"]) == (404, "unknown_region")


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"key":1,"byte_size":1}', b'{"key":"/etc","byte_size":1}', b"{"])
async def test_a_wrong_region_is_refused(site: HttpSite, body: bytes) -> None:
    answer = await site.client.post("/v2/systemsharedmemory/region/r/register", content=body)

    assert answer.status_code == 400
    assert (await site.client.get("/v2/systemsharedmemory/status")).json() == []


# ------------------------------------------------------------ the plain upload


JPEG = b"\xff\xd8jpeg"


async def test_an_upload_as_a_form_or_as_the_body_itself_gives_labels(site: HttpSite, flow: Echo) -> None:
    query = "/v1/classify?model=classifier"
    form = await site.client.post(f"{query}&top_k=2", files={"file": ("cat.jpg", JPEG)})
    plain = await site.client.post(query, params={"model": "classifier", "top_k": 2}, content=JPEG)
    fields = await site.client.post(
        "/v1/classify", files={"x": ("a.png", JPEG)}, data={"top_k": "2", "model": "classifier"}
    )

    told = form.json()
    assert [one.status_code for one in (form, plain, fields)] == [200, 200, 200]
    assert [label["name"] for label in told["labels"]] == ["label 3", "label 0"]
    assert (told["model"], told["version"]) == ("classifier", VERSION)
    assert told["server_timing"]["run_ms"] == 2.0
    assert told["request_id"] == form.headers["request-id"]
    assert "run;dur=2.000" in form.headers["server-timing"]
    assert [bytes(request.inputs[0].data) for request in flow.requests] == [JPEG] * 3
    assert [request.options for request in flow.requests] == [{"top_k": 2}] * 3
    assert site.outcomes.counts == {("Classify", "ok"): 3}


async def test_an_upload_for_boxes_gives_them_in_pixels(site: HttpSite, flow: Echo) -> None:
    query = "/v1/detect?model=detector&score_threshold=0.5&classes=cat&classes=7"
    form = await site.client.post(query, files={"file": ("cat.jpg", JPEG)}, data={"max_detections": "3"})
    other = await site.client.post("/v1/detect?model=classifier", content=JPEG)
    labels = await site.client.post("/v1/classify?model=detector", content=JPEG)

    told = form.json()
    assert told["detections"] == [
        {
            "label": {"index": 1, "name": "cat", "score": 0.5},
            "left": 1.5,
            "top": 2.5,
            "right": 30.0,
            "bottom": 40.0,
        }
    ]
    assert (told["width"], told["height"], told["model"], told["version"]) == (80, 60, "detector", VERSION)
    assert flow.requests[0].options == {"score_threshold": 0.5, "classes": ["cat", "7"], "max_detections": 3}
    assert (other.status_code, "'classifier' does not answer with boxes" in other.json()["error"]) == (400, True)
    assert (labels.status_code, "'detector' does not answer with labels" in labels.json()["error"]) == (400, True)
    assert site.outcomes.counts[("Detect", "ok")] == 1


async def test_an_upload_without_a_model_leaves_the_choice_to_the_routing(site: HttpSite, flow: Echo) -> None:
    flow.fail = NotReady("no")
    headers = {"content-type": "text/plain; charset=utf-8"}
    image = await site.client.post("/v1/classify", content=JPEG)
    await site.client.post("/v1/classify", content="hello", headers=headers)

    assert image.status_code == 503
    assert [(request.model, request.inputs[0].kind) for request in flow.requests] == [("", "image"), ("", "text")]
    assert [request.task for request in flow.requests] == ["image_classification", "text_classification"]

    flow.requests.clear()
    for task in ("detect", "embed", "entities"):
        await site.client.post(f"/v1/{task}", content=b"x")
    tasks = [request.task for request in flow.requests]
    assert tasks == ["object_detection", "text_embedding", "token_classification"]


async def test_an_uploads_deadline_and_request_id(site: HttpSite, flow: Echo) -> None:
    answer = await site.client.post(
        "/v1/classify?timeout_ms=1500&model=classifier", content=JPEG, headers={"request-id": "mine"}
    )

    assert answer.headers["request-id"] == flow.requests[0].request_id == "mine"
    assert flow.requests[0].deadline_s - flow.requests[0].arrived_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("query", "sentence", "code"),
    [
        ("model=nobody", "model 'nobody' is not served", 404),
        ("model=identity", "model 'identity' takes tensors: use POST /v2/models/identity/infer", 400),
        ("timeout_ms=soon", "timeout_ms is 'soon'", 400),
        ("timeout_ms=0", "timeout_ms is '0'", 400),
        ("top_k=1&top_k=2", "parameter 'top_k' is given twice", 400),
    ],
)
async def test_a_wrong_query_is_refused(site: HttpSite, query: str, sentence: str, code: int) -> None:
    answer = await site.client.post(f"/v1/classify?{query}", content=b"x")

    assert (answer.status_code, sentence in answer.json()["error"]) == (code, True)


async def test_a_wrong_upload_is_refused(site: HttpSite, flow: Echo) -> None:
    empty = await site.client.post("/v1/classify")
    empty_file = await site.client.post("/v1/classify", files={"file": ("a.jpg", b"")})
    two = await site.client.post("/v1/classify", files=[("file", ("a", b"a")), ("file", ("b", b"b"))])
    none = await site.client.post("/v1/classify", files={"top_k": (None, b"2")})
    broken = await site.client.post("/v1/classify", content=b"x", headers={"content-type": "multipart/form-data"})
    cut = await site.client.post(
        "/v1/classify",
        content=b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf',
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    large = await site.client.post("/v1/classify", content=bytes(1024 * 1024 + 1))

    assert [one.status_code for one in (empty, empty_file, two, none, broken, cut)] == [400] * 6
    assert "the form has 2 files and needs exactly 1" in two.json()["error"]
    assert large.status_code == 413
    assert not flow.requests


# ------------------------------------------------------------ documentation


async def test_the_documentation_loads_nothing_and_describes_every_route(site: HttpSite) -> None:
    page = await site.client.get("/docs")
    described = (await site.client.get("/openapi.json")).json()

    assert "http-equiv" not in page.text
    assert "src=" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path, operations in described["paths"].items():
        if path.startswith(("/v1", "/v2")):
            assert path.replace("<", "&lt;") in page.text
            for operation in operations.values():
                assert operation["responses"]["200"]["content"]["application/json"]["example"] is not None
                assert {one["name"] for one in operation["parameters"] if one["in"] == "path"} == {
                    part[1:-1] for part in path.split("/") if part.startswith("{")
                }
    assert {"/v1/classify", "/v1/detect", "/v2/models/{model}/infer", "/healthz"} <= set(described["paths"])


async def test_ten_thousand_numbers_and_many_callers_get_their_own_answers(site: HttpSite) -> None:
    async def one(number: int) -> None:
        values = [float(number + index) for index in range(100)]
        given = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 50, 2], "data": values}
        answer = await site.client.post("/v2/models/free/infer", json={"inputs": [given], "id": str(number)})
        assert answer.json()["outputs"][0]["data"] == values
        assert answer.json()["id"] == str(number)

    await asyncio.gather(*(one(number) for number in range(100)))


async def test_two_inputs_json_and_binary_mixed(site: HttpSite) -> None:
    first, second = struct.pack("<4i", 1, 2, 3, 4), [5, 6, 7, 8]
    text = msgspec.json.encode(
        {
            "inputs": [
                {"name": "INPUT1", "datatype": "INT32", "shape": [1, 4], "data": second},
                {"name": "INPUT0", "datatype": "INT32", "shape": [1, 4], "parameters": {"binary_data_size": 16}},
            ],
            "outputs": [{"name": "OUTPUT1"}],
        }
    )
    answer = await site.client.post(
        "/v2/models/pair/infer", content=text + first, headers={"Inference-Header-Content-Length": str(len(text))}
    )

    assert answer.json()["outputs"] == [{"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 4], "data": [5, 6, 7, 8]}]
