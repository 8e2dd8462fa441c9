"""System shared memory and the model repository over a real gRPC server."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.shared_memory import SharedMemory as Object
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.state import ModelState
from protos.inference import grpc_service_pb2 as pb
from protos.inference import grpc_service_pb2_grpc as pb_grpc
from shared.errors import UnknownModel
from shared.tensors import pack_bytes
from tests.support.fake_flow import VERSION, settings
from tests.support.open_inference_parts import Stack

PREFIX = f"headrace-test-{secrets.token_hex(4)}-"
SIXTEEN = np.arange(16, dtype="<f4").tobytes()
Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor


@pytest.fixture
def shm() -> Iterator[Object]:
    one = Object(f"{PREFIX}both", create=True, size=4096)
    yield one
    one.close()
    one.unlink()


@asynccontextmanager
async def calling(stack: Stack | None = None) -> AsyncIterator[tuple[Stack, "pb_grpc.GRPCInferenceServiceAsyncStub"]]:
    stack = stack or Stack(settings(gateway={"system_shared_memory_prefix": PREFIX}))
    async with stack.serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        yield stack, pb_grpc.GRPCInferenceServiceStub(channel)


async def register(stub: "pb_grpc.GRPCInferenceServiceAsyncStub", shm: Object, name: str = "both") -> None:
    await stub.SystemSharedMemoryRegister(
        pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{shm.name}", offset=0, byte_size=4096)
    )


def placed(nbytes: int, offset: int = 0, region: str = "both") -> dict[str, pb.InferParameter]:
    return {
        "shared_memory_region": pb.InferParameter(string_param=region),
        "shared_memory_byte_size": pb.InferParameter(int64_param=nbytes),
        "shared_memory_offset": pb.InferParameter(int64_param=offset),
    }


def request(nbytes: int = 64, into: int | None = 64) -> pb.ModelInferRequest:
    one = Input(name="INPUT0", datatype="FP32", shape=[1, 16], parameters=placed(nbytes))
    outputs = [] if into is None else [Output(name="OUTPUT0", parameters=placed(into, 1024))]
    return pb.ModelInferRequest(model_name="identity", inputs=[one], outputs=outputs)


async def refused(call: Any) -> tuple[str, str]:  # noqa: ANN401 - any call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details() or ""


async def test_tensors_go_both_ways_through_a_region(shm: Object) -> None:
    shm.buf[:64] = SIXTEEN
    async with calling() as (_, stub):
        await register(stub, shm)
        status = (await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions["both"]
        answer = await stub.ModelInfer(request())
        raw = await stub.ModelInfer(request(into=None))
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
        after = (await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions

    assert (status.key, status.offset, status.byte_size) == (f"/{shm.name}", 0, 4096)
    assert list(answer.raw_output_contents) == [b""]
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("FP32", [1, 16])
    assert bytes(shm.buf[1024:1088]) == SIXTEEN
    assert list(raw.raw_output_contents) == [SIXTEEN]
    assert not after


async def test_bytes_in_a_region_are_checked_as_in_a_message(shm: Object) -> None:
    raw = pack_bytes([b"text"])
    shm.buf[: len(raw)] = raw

    def asked(nbytes: int) -> pb.ModelInferRequest:
        one = Input(name="INPUT0", datatype="BYTES", shape=[1, 1], parameters=placed(nbytes))
        return pb.ModelInferRequest(model_name="bytes", inputs=[one])

    async with calling() as (_, stub):
        await register(stub, shm)
        answer = await stub.ModelInfer(asked(len(raw)))
        cut = await refused(stub.ModelInfer(asked(len(raw) - 1)))

    assert list(answer.raw_output_contents) == [raw]
    assert cut[0] == "INVALID_ARGUMENT"
    assert "length 4" in cut[1]


async def test_wrong_places_are_refused_and_nothing_is_written(shm: Object) -> None:
    async with calling() as (stack, stub):
        await register(stub, shm)
        other = pb.ModelInferRequest(
            model_name="identity",
            inputs=[Input(name="INPUT0", datatype="FP32", shape=[1, 16], parameters=placed(64, region="nope"))],
        )
        answers = {
            "size": await refused(stub.ModelInfer(request(nbytes=60))),
            "beyond": await refused(stub.ModelInfer(request(nbytes=5000))),
            "unknown": await refused(stub.ModelInfer(other)),
            "missing": await refused(
                stub.SystemSharedMemoryRegister(
                    pb.SystemSharedMemoryRegisterRequest(name="a", key=f"{PREFIX}nope", byte_size=1)
                )
            ),
            "prefix": await refused(
                stub.SystemSharedMemoryRegister(
                    pb.SystemSharedMemoryRegisterRequest(name="a", key="../../etc/passwd", byte_size=1)
                )
            ),
        }
        before = len(stack.flow.requests)
        answers["small"] = await refused(stub.ModelInfer(request(into=60)))

    assert {name: code for name, (code, _) in answers.items()} == {
        "size": "INVALID_ARGUMENT",
        "beyond": "INVALID_ARGUMENT",
        "unknown": "NOT_FOUND",
        "missing": "NOT_FOUND",
        "prefix": "INVALID_ARGUMENT",
        "small": "INVALID_ARGUMENT",
    }
    assert "60 bytes" in answers["size"][1]
    assert "64" in answers["size"][1]
    assert before == 0
    assert bytes(shm.buf[1024:1088]) == bytes(64)


async def test_a_region_that_is_unregistered_or_cut_while_a_request_runs(shm: Object) -> None:
    shm.buf[:64] = SIXTEEN
    async with calling() as (stack, stub):
        await register(stub, shm)
        stack.flow.gate = asyncio.Event()
        first = asyncio.ensure_future(stub.ModelInfer(request()))
        await stack.flow.until(lambda flow: flow.running == 1, "the request to reach the flow")
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="both"))
        stack.flow.gate.set()
        await first
        assert bytes(shm.buf[1024:1088]) == SIXTEEN

        stack.flow.gate.clear()
        await register(stub, shm)
        second = asyncio.ensure_future(stub.ModelInfer(request()))
        await stack.flow.until(lambda flow: flow.running == 1, "the second request to reach the flow")
        os.truncate(Path("/dev/shm") / shm.name, 0)
        stack.flow.gate.set()
        code, text = await refused(second)
        after = await refused(stub.ModelInfer(request()))

    assert (code, after[0]) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
    assert "was cut" in text
    assert "only 0 of 64 bytes" in after[1]


class Control:
    """A repository with one model, `a`."""

    def __init__(self) -> None:
        self.loaded = {"a"}

    async def load(self, name: str) -> None:
        if name != "a":
            raise UnknownModel(f"model {name!r} is not in the repository")
        self.loaded.add(name)

    async def unload(self, name: str) -> None:
        self.loaded.remove(name)

    def index(self) -> list[ModelState]:
        return [ModelState("a", VERSION, "ready" if "a" in self.loaded else "no_worker", "")]


async def test_load_and_unload_in_both_dialects() -> None:
    control = Control()
    stack = Stack(settings(gateway={"repository_control": True}), control)
    async with calling(stack) as (_, stub):
        plain = await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="a"))
        assert control.loaded == set()
        other = await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(repository_name="a"))
        assert control.loaded == {"a"}
        unknown = await refused(stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="b")))
        nobody = await refused(stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="b")))
        extensions = (await stub.ServerMetadata(pb.ServerMetadataRequest())).extensions

    assert (plain.model_name, plain.isUnloaded) == ("a", True)
    assert (other.model_name, other.isLoaded) == ("a", True)
    assert unknown[0] == nobody[0] == "NOT_FOUND"
    assert "model_repository" in extensions
