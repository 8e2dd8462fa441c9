"""The real tritonclient over HTTP, and uploads as curl sends them, against the whole server."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from headrace import builtin_models
from tests.support.stack import Site, serving, simulated_repository

triton = pytest.importorskip("tritonclient.http", reason="tritonclient is in the development extra")
triton_aio = pytest.importorskip("tritonclient.http.aio")

Client = Typeless = Any  # tritonclient has no types
Array = npt.NDArray[Any]
ROW = np.arange(16, dtype=np.float32).reshape(1, 16)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The built-in models and a simulated classifier."""
    repository = simulated_repository(tmp_path_factory.mktemp("triton") / "models", "sim")
    builtin_models.fetch(repository)
    site = Site(tmp_path_factory.mktemp("site"), repository, gateway={"max_message_bytes": 8 * 1024 * 1024})
    with serving(site):
        yield site


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with triton.InferenceServerClient(site.http, concurrency=8) as client:
        yield client


def given(array: Array, name: str = "INPUT0", *, binary: bool) -> Typeless:
    datatype = {"float32": "FP32", "int32": "INT32", "object": "BYTES"}[array.dtype.name]
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def wanted(name: str = "OUTPUT0", *, binary: bool, **more: int) -> Typeless:
    return triton.InferRequestedOutput(name, binary_data=binary, **more)


BOTH_WAYS = pytest.mark.parametrize(("sent", "asked"), [(False, False), (False, True), (True, False), (True, True)])


@BOTH_WAYS
def test_floats_come_back_as_they_were_sent(client: Client, sent: bool, asked: bool) -> None:
    answer = client.infer(
        "identity", [given(ROW, binary=sent)], outputs=[wanted(binary=asked)], request_id="my id", priority=1
    )

    assert answer.get_response()["id"] == "my id"
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ROW)


@BOTH_WAYS
def test_two_inputs_and_outputs_each_by_its_name(client: Client, sent: bool, asked: bool) -> None:
    first, second = (np.arange(32, dtype=np.int32).reshape(2, 16) * factor for factor in (3, -(2**20)))
    inputs = [given(second, "INPUT1", binary=sent), given(first, binary=not sent)]
    answer = client.infer("add_sub", inputs, outputs=[wanted("OUTPUT1", binary=asked), wanted(binary=not asked)])

    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), first + second)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), first - second)


@BOTH_WAYS
def test_texts_of_any_length(client: Client, sent: bool, asked: bool) -> None:
    texts = np.array([["a"], [""], ["größer\n"], ["x" * 30_000]], dtype=np.object_)
    answer = client.infer("identity_bytes", [given(texts, binary=sent)], outputs=[wanted(binary=asked)])

    found = [one.decode() if isinstance(one, bytes) else one for one in answer.as_numpy("OUTPUT0").reshape(-1)]
    assert found == texts.reshape(-1).tolist()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_read_and_the_answer_may_be_plain(client: Client, algorithm: str) -> None:
    answer = client.infer(
        "identity",
        [given(ROW, binary=True)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )

    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ROW)


def test_what_clients_ask_before_the_first_request(client: Client) -> None:
    metadata, config = client.get_model_metadata("add_sub"), client.get_model_config("add_sub")
    version = metadata["versions"][0]

    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub", version)
    assert not client.is_model_ready("nobody")
    assert {"statistics", "model_configuration", "binary_tensor_data"} <= set(
        client.get_server_metadata()["extensions"]
    )
    assert [one["name"] for one in metadata["inputs"]] == ["INPUT0", "INPUT1"]
    assert metadata["inputs"][0]["shape"] == [-1, 16]
    assert config["max_batch_size"] >= 1
    assert {"name": "identity", "version": client.get_model_metadata("identity")["versions"][0]}.items() <= next(
        one for one in client.get_model_repository_index() if one["name"] == "identity"
    ).items()


def test_statistics_count_rows_and_requests(client: Client) -> None:
    def counts() -> tuple[int, int, int, int]:
        found = client.get_inference_statistics("identity")["model_stats"][0]
        stats = found["inference_stats"]
        assert stats["compute_infer"]["count"] == stats["compute_input"]["count"] == stats["compute_output"]["count"]
        assert sum(int(one["compute_output"]["ns"]) for one in found["batch_stats"]) == stats["compute_output"]["ns"]
        return (
            found["inference_count"],
            found["execution_count"],
            stats["success"]["count"],
            stats["fail"]["count"],
        )

    before = counts()
    client.infer("identity", [given(np.repeat(ROW, 3, axis=0), binary=True)])
    with pytest.raises(triton.InferenceServerException):
        client.infer("identity", [given(ROW[:, :15], binary=True)])
    after = counts()

    assert [now - then for then, now in zip(before, after, strict=True)] == [3, 1, 1, 1]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("model", "array", "name", "refused"),
    [
        ("nobody", ROW, "INPUT0", (404, "model 'nobody' is not served")),
        ("identity", ROW[:, :15], "INPUT0", (400, "has shape [1, 15]; model 'identity' takes [-1, 16]")),
        ("identity", ROW.astype(np.int32), "INPUT0", (400, "datatype 'INT32'; model 'identity' takes FP32")),
        ("identity", ROW, "INPUT7", (400, "takes 1 input")),
    ],
)
def test_a_mistake_is_named_with_the_status_that_clients_expect(
    client: Client, binary: bool, model: str, array: Array, name: str, refused: tuple[int, str]
) -> None:
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer(model, [given(array, name, binary=binary)])

    assert caught.value.status() == str(refused[0])
    assert refused[1] in caught.value.message()


def test_a_message_over_the_limit_is_refused_and_the_next_one_works(client: Client) -> None:
    rows = np.zeros((200_000, 16), np.float32)
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer("identity", [given(rows, binary=True)])

    assert caught.value.status() == "413"
    assert "gateway.max_message_bytes" in caught.value.message()
    np.testing.assert_array_equal(client.infer("identity", [given(ROW, binary=True)]).as_numpy("OUTPUT0"), ROW)


def test_the_timeout_parameter_is_the_deadline(client: Client) -> None:
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer("simulated_slow", [given(ROW, binary=True)], timeout=20_000)

    assert caught.value.status() == "504"


def test_many_at_once_each_get_their_own_answer(client: Client) -> None:
    rows = [ROW + 100 * number for number in range(200)]
    pending = [client.async_infer("identity", [given(row, binary=number % 2 == 0)]) for number, row in enumerate(rows)]

    for one, row in zip(pending, rows, strict=True):
        np.testing.assert_array_equal(one.get_result().as_numpy("OUTPUT0"), row)


def test_the_asyncio_client_gets_its_answers_too(site: Site) -> None:
    async def everything() -> list[Array]:
        async with triton_aio.InferenceServerClient(site.http) as client:

            async def one(number: int) -> Typeless:
                answer = await client.infer("identity", [given(ROW + number, binary=number % 2 == 0)])
                return answer.as_numpy("OUTPUT0")

            return await asyncio.gather(*(one(number) for number in range(100)))

    for number, found in enumerate(asyncio.run(everything())):
        np.testing.assert_array_equal(found, ROW + number)


def test_an_image_goes_in_as_bytes_and_comes_back_as_tensors_or_classes(client: Client, jpeg: bytes) -> None:
    image = triton.InferInput("image", [1, 1], "BYTES")
    image.set_data_from_numpy(np.array([[jpeg]], dtype=np.object_), binary_data=True)
    plain = client.infer("sim", [image], parameters={"top_k": 3})
    classes = client.infer("sim", [image], outputs=[wanted("scores", binary=True, class_count=2)])

    scores, numbers, labels = (plain.as_numpy(name) for name in ("scores", "classes", "labels"))
    assert scores.shape == numbers.shape == labels.shape == (1, 3)
    assert scores[0, 0] >= scores[0, 1] >= scores[0, 2]
    value, index = classes.as_numpy("scores")[0][0].decode().split(":")[:2]
    assert (float(value), int(index)) == (pytest.approx(float(scores[0, 0]), abs=1e-5), int(numbers[0, 0]))


# ------------------------------------------------------------ the plain upload


def test_an_upload_as_curl_sends_it(site: Site, jpeg: bytes) -> None:
    with httpx.Client(base_url=f"http://{site.http}") as http:
        form = http.post("/v1/classify", params={"top_k": 3}, files={"file": ("cat.jpg", jpeg, "image/jpeg")})
        plain = http.post("/v1/classify", params={"model": "sim", "top_k": 3}, content=jpeg)
        broken = http.post("/v1/classify", content=jpeg[: len(jpeg) // 2])
        option = http.post("/v1/classify", params={"top_k": 100_000}, content=jpeg)
        tensors = http.post("/v1/classify", params={"model": "identity"}, content=jpeg)

    assert form.status_code == plain.status_code == 200
    assert len(form.json()["labels"]) == 3
    assert form.json()["labels"] == plain.json()["labels"]
    assert form.json()["server_timing"]["run_ms"] > 0
    assert "prepare;dur=" in form.headers["server-timing"]
    assert [broken.status_code, option.status_code, tensors.status_code] == [400, 400, 400]
    assert "top_k" in option.json()["error"]


def test_curl_itself(site: Site, jpeg: bytes, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    photo = tmp_path / "cat.jpg"
    photo.write_bytes(jpeg)
    upload = [curl, "-sS", "--max-time", "20", "-F", f"file=@{photo}", f"http://{site.http}/v1/classify?top_k=2"]
    inputs = [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": ROW.tolist()}]
    infer = [curl, "-sS", "--max-time", "20", f"http://{site.http}/v2/models/identity/infer"]

    labels = json.loads(subprocess.run(upload, capture_output=True, check=True).stdout)["labels"]
    told = json.loads(
        subprocess.run([*infer, "-d", json.dumps({"inputs": inputs})], capture_output=True, check=True).stdout
    )

    assert len(labels) == 2
    assert told["outputs"][0]["data"] == ROW.reshape(-1).tolist()
