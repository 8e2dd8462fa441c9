"""What tests/e2e/test_triton_grpc.py runs with the real tritonclient, in a process of its own. One function a case.

Every case takes the server's address. The models are the built-in ones and `sim`, a simulated image classifier.
"""

import asyncio
import queue
import secrets
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

SIXTEEN = np.arange(16, dtype=np.float32).reshape(1, 16)


def _input(name: str, array: np.ndarray[Any, Any], datatype: str) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def _identity(array: np.ndarray[Any, Any] = SIXTEEN) -> list[triton.InferInput]:
    return [_input("INPUT0", array, "FP32")]


def _failure(call: Any, *arguments: Any, **keywords: Any) -> tuple[str, str]:  # noqa: ANN401 - any method of the client
    try:
        call(*arguments, **keywords)
    except InferenceServerException as error:
        return str(error.status()), str(error.message())
    raise AssertionError(f"{call.__name__} of {arguments} did not fail")


# ---------------------------------------------------------------- one call, one answer


def facts(address: str) -> None:
    """Health, metadata, configuration, index, statistics."""
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("identity")
        assert not client.is_model_ready("nothing")
        server = client.get_server_metadata()
        assert server.name == "headrace"
        assert "statistics" in server.extensions
        described = client.get_model_metadata("add_sub", as_json=True)
        assert [one["name"] for one in described["inputs"]] == ["INPUT0", "INPUT1"]
        assert described["outputs"][1]["shape"] == ["-1", "16"]
        config = client.get_model_config("identity_bytes").config
        assert config.max_batch_size >= 1
        assert config.input[0].data_type == 13  # TYPE_STRING
        assert config.HasField("dynamic_batching")
        assert not config.HasField("model_transaction_policy")
        index = {one.name: one.state for one in client.get_model_repository_index().models}
        assert index["identity"] == "READY"
        before = client.get_inference_statistics("identity").model_stats[0]
        client.infer("identity", _identity())
        after = client.get_inference_statistics("identity", before.version).model_stats[0]
        assert after.inference_count == before.inference_count + 1
        counts = after.inference_stats
        assert counts.success.count == counts.queue.count == counts.compute_infer.count
        assert counts.compute_input.count == counts.compute_infer.count == counts.compute_output.count


def infer(address: str) -> None:
    """Each built-in model, with everything that the client can add to a request."""
    with triton.InferenceServerClient(address) as client:
        result = client.infer(
            "identity",
            _identity(),
            request_id="any é id",
            outputs=[triton.InferRequestedOutput("OUTPUT0")],
            priority=1,
            timeout=5_000_000,
            client_timeout=10,
            headers={"x-custom": "header"},
            compression_algorithm="gzip",
            parameters={"custom": "text", "number": 3, "flag": True},
        )
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), SIXTEEN)
        assert result.get_response().id == "any é id"
        assert result.get_response().model_version
        a, b = (np.arange(48, dtype=np.int32).reshape(3, 16) + base for base in (0, 7))
        result = client.infer("add_sub", [_input("INPUT0", a, "INT32"), _input("INPUT1", b, "INT32")])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)
        assert result.as_numpy("nothing") is None
        texts = np.array([["é".encode()], [b""], [b"\x00\xff" * 50_000]], dtype=np.object_)
        result = client.infer("identity_bytes", [_input("INPUT0", texts, "BYTES")])
        assert result.as_numpy("OUTPUT0").tolist() == texts.tolist()
        many = np.random.default_rng(1).random((300, 16), np.float32)  # more rows than a batch may have
        np.testing.assert_array_equal(client.infer("identity", _identity(many)).as_numpy("OUTPUT0"), many)


def classify(address: str, photo: str) -> None:
    """An image as BYTES, its option as a parameter, and the classification extension."""
    jpeg = Path(photo).read_bytes()
    image = [_input("image", np.array([[jpeg], [jpeg]], dtype=np.object_), "BYTES")]
    with triton.InferenceServerClient(address) as client:
        result = client.infer("sim", image, parameters={"top_k": 3})
        assert result.as_numpy("scores").shape == result.as_numpy("classes").shape == (2, 3)
        assert result.as_numpy("classes").dtype == np.int32
        assert result.as_numpy("labels").shape == (2, 3)
        asked = [triton.InferRequestedOutput("scores", class_count=2)]
        best = client.infer("sim", image, outputs=asked).as_numpy("scores")
        assert best.shape == (2, 2)
        score, number = best[0][0].decode().split(":")[:2]
        assert abs(float(score) - result.as_numpy("scores")[0][0]) < 1e-5
        assert int(number) == result.as_numpy("classes")[0][0]
        broken = [_input("image", np.array([[b"no image"]], dtype=np.object_), "BYTES")]
        assert _failure(client.infer, "sim", broken)[0] == "StatusCode.INVALID_ARGUMENT"
        assert _failure(client.infer, "sim", image, parameters={"top_k": 0})[0] == "StatusCode.INVALID_ARGUMENT"


def refusals(address: str) -> None:
    """Status and sentence of each failure, as users match on both."""
    wrong_shape = _identity(np.zeros((1, 17), np.float32))
    with triton.InferenceServerClient(address) as client:
        cases: dict[str, tuple[tuple[str, str], str]] = {
            "model": (_failure(client.infer, "nothing", _identity()), "NOT_FOUND"),
            "version": (_failure(client.infer, "identity", _identity(), model_version="99"), "NOT_FOUND"),
            "junk": (_failure(client.infer, "identity", _identity(), model_version="1junk"), "INVALID_ARGUMENT"),
            "shape": (_failure(client.infer, "identity", wrong_shape), "INVALID_ARGUMENT"),
            "input": (_failure(client.infer, "identity", [_input("x", SIXTEEN, "FP32")]), "INVALID_ARGUMENT"),
            "output": (
                _failure(client.infer, "identity", _identity(), outputs=[triton.InferRequestedOutput("x")]),
                "INVALID_ARGUMENT",
            ),
            "metadata": (_failure(client.get_model_metadata, "nothing"), "NOT_FOUND"),
            "config": (_failure(client.get_model_config, "nothing"), "NOT_FOUND"),
            "statistics": (_failure(client.get_inference_statistics, "nothing"), "INVALID_ARGUMENT"),
            "load": (_failure(client.load_model, "identity"), "UNIMPLEMENTED"),
            "trace": (_failure(client.get_trace_settings), "UNIMPLEMENTED"),
            "cuda": (_failure(client.get_cuda_shared_memory_status), "UNIMPLEMENTED"),
            "late": (_failure(client.infer, "simulated_slow", _identity(), client_timeout=0.02), "DEADLINE_EXCEEDED"),
            "timeout": (_failure(client.infer, "simulated_slow", _identity(), timeout=1000), "DEADLINE_EXCEEDED"),
        }
        assert client.infer("identity", _identity())
    for name, ((status, message), wanted) in cases.items():
        assert status == f"StatusCode.{wanted}", f"{name}: {status} {message}"
    assert "'nothing'" in cases["model"][0][1]
    assert "[1, 17]" in cases["shape"][0][1]


def callbacks(address: str) -> None:
    """`async_infer`: many at once, each answer to its question; a cancelled one is told so."""
    done: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        for number in range(200):
            client.async_infer(
                "identity",
                _identity(np.full((1, 16), number, np.float32)),
                callback=lambda result, error, number=number: done.put((number, result, error)),
            )
        for _ in range(200):
            number, result, error = done.get(timeout=30)
            assert error is None, error
            assert (result.as_numpy("OUTPUT0") == number).all()
        call = client.async_infer(
            "simulated_slow", _identity(), callback=lambda result, error: done.put((0, result, error))
        )
        call.cancel()
        _, result, error = done.get(timeout=30)
        assert result is None
        assert "CANCELLED" in str(error.status()) or "cancelled" in str(error).lower()


# ---------------------------------------------------------------- streams and asyncio


def stream(address: str) -> None:
    """Answers in order, a failed request in between, and a clean end."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for number in range(100):
            model = "nothing" if number == 50 else "identity"
            data = _identity(np.full((1, 16), number, np.float32))
            client.async_stream_infer(model, data, request_id=str(number), enable_empty_final_response=True)
        for number in range(100):
            result, error = answers.get(timeout=30)
            if number == 50:
                assert "'nothing'" in error.message(), error
                continue
            assert error is None, error
            response = result.get_response()
            assert response.id == str(number)
            assert response.parameters["triton_final_response"].bool_param
            assert (result.as_numpy("OUTPUT0") == number).all()
        client.stop_stream()
        assert answers.empty()


def aio(address: str) -> None:
    """The asyncio client: calls, a cancelled call, and a stream."""
    asyncio.run(_aio(address))


async def _status(call: Awaitable[Any]) -> str:
    try:
        await call
    except InferenceServerException as error:
        return str(error.status()).removeprefix("StatusCode.")
    return "OK"


async def _aio(address: str) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_server_ready()
        assert (await client.get_model_metadata("identity")).name == "identity"

        async def one(number: int) -> bool:
            result = await client.infer("identity", _identity(np.full((1, 16), number, np.float32)))
            return bool((result.as_numpy("OUTPUT0") == number).all())

        assert all(await asyncio.gather(*(one(number) for number in range(300))))
        assert await _status(client.infer("identity", _identity(np.zeros((1, 17), np.float32)))) == "INVALID_ARGUMENT"

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in range(50):
                data = _identity(np.full((1, 16), number, np.float32))
                yield {"model_name": "identity", "inputs": data, "request_id": str(number)}

        seen = 0
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            assert result.get_response().id == str(seen)
            assert (result.as_numpy("OUTPUT0") == seen).all()
            seen += 1
        assert seen == 50


def storm(address: str, requests: int, cancelled: int) -> dict[str, int]:
    """Distinct requests all at once, `cancelled` of them given up: every other answer matches its question."""
    return asyncio.run(_storm(address, requests, cancelled))


async def _storm(address: str, requests: int, cancelled: int) -> dict[str, int]:
    counts = {"right": 0, "wrong": 0, "cancelled": 0, "failed": 0}
    async with triton_aio.InferenceServerClient(address) as client:

        async def one(number: int) -> None:
            data = np.arange(16, dtype=np.float32).reshape(1, 16) + number
            call = asyncio.ensure_future(client.infer("identity", _identity(data), client_timeout=60))
            if number < cancelled:
                await asyncio.sleep(0.001 * (number % 50))  # given up at different moments of its life
                call.cancel()
            try:
                result = (await call).as_numpy("OUTPUT0")
            except asyncio.CancelledError:
                counts["cancelled"] += 1
            except InferenceServerException as error:
                counts["cancelled" if "CANCELLED" in str(error.status()) else "failed"] += 1
            else:
                counts["right" if np.array_equal(result, data) else "wrong"] += 1

        await asyncio.gather(*(one(number) for number in range(requests)))
    return counts


# ---------------------------------------------------------------- shared memory


def shared_memory(address: str, prefix: str) -> None:
    """Inputs and outputs in regions; what is not registered is NOT_FOUND."""
    # The client's own helper for regions needs setuptools' pkg_resources, which is gone; the calls are its own.
    key = f"/{prefix}{secrets.token_hex(4)}"
    region = Path("/dev/shm" + key)
    try:
        region.write_bytes(SIXTEEN.tobytes() + bytes(64))
        with triton.InferenceServerClient(address) as client:
            client.unregister_system_shared_memory()
            client.register_system_shared_memory("both", key, 128)
            assert client.get_system_shared_memory_status().regions["both"].byte_size == 128
            sent = triton.InferInput("INPUT0", [1, 16], "FP32")
            sent.set_shared_memory("both", 64)
            wanted = triton.InferRequestedOutput("OUTPUT0")
            wanted.set_shared_memory("both", 64, offset=64)
            result = client.infer("identity", [sent], outputs=[wanted])
            assert list(result.get_output("OUTPUT0").shape) == [1, 16]
            assert region.read_bytes()[64:] == SIXTEEN.tobytes()
            client.unregister_system_shared_memory("both")
            status, message = _failure(client.infer, "identity", [sent])
            assert (status, "'both'" in message) == ("StatusCode.NOT_FOUND", True)
            status, _ = _failure(client.register_system_shared_memory, "other", "/not-the-prefix", 1)
            assert status == "StatusCode.INVALID_ARGUMENT"
    finally:
        region.unlink()
