"""Plain grpc.aio, one process: takes the bytes of a request and gives bytes back, without parsing either.

`/bench.Echo/Same` answers the request's own bytes; `/bench.Echo/Answer` the bytes of a real answer (about 200), which
is what a server has to send; `/bench.Echo/Stream` does so for each message of a stream. With `--canned`, every file of
a folder is a method of `inference.GRPCInferenceService` that always answers the file's bytes, so that a load generator
of that protocol can run against it; ModelStatistics counts the ModelInfer that were answered. Stops on SIGTERM.
"""

import argparse
import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from protos.inference import grpc_service_pb2 as pb

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Method = Callable[[bytes, _Context], Awaitable[bytes]]


class _Canned:
    """Fixed answers to a protocol's methods."""

    def __init__(self, folder: Path | None) -> None:
        self._answers = {} if folder is None else {file.name: file.read_bytes() for file in folder.iterdir()}
        self._answered = 0

    def methods(self) -> dict[str, _Method]:
        """By name."""
        found = {name: _always(answer) for name, answer in self._answers.items()}
        if found:
            found |= {"ModelInfer": self._infer, "ModelStatistics": self._statistics}
        return found

    async def _infer(self, _request: bytes, _context: _Context) -> bytes:
        self._answered += 1
        return self._answers["ModelInfer"]

    async def _statistics(self, _request: bytes, _context: _Context) -> bytes:
        answer = pb.ModelStatisticsResponse.FromString(self._answers["ModelStatistics"])
        for model in answer.model_stats:
            model.inference_count = model.execution_count = self._answered
            model.inference_stats.success.count = model.inference_stats.queue.count = self._answered
        return answer.SerializeToString()


def _always(answer: bytes) -> _Method:
    async def answered(_request: bytes, _context: _Context) -> bytes:
        return answer

    return answered


def _stream(answer: bytes) -> "grpc.RpcMethodHandler[bytes, bytes]":
    async def answered(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(answer)

    return grpc.stream_stream_rpc_method_handler(answered)


async def _same(request: bytes, _context: _Context) -> bytes:
    return request


def _handlers(answer: bytes, canned: _Canned) -> tuple[grpc.GenericRpcHandler, ...]:
    unary = {
        "bench.Echo": {"Same": _same, "Answer": _always(answer)},
        "inference.GRPCInferenceService": canned.methods(),
    }
    found: dict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = {
        service: {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        for service, methods in unary.items()
    }
    found["bench.Echo"]["Stream"] = _stream(answer)
    return tuple(grpc.method_handlers_generic_handler(service, methods) for service, methods in found.items())


async def _serve(answer: bytes, canned: _Canned) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(_handlers(answer, canned))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await stop.wait()
    await server.stop(grace=None)


def main() -> None:
    """Serve on a free port and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer", type=Path, help="file with the bytes that Answer gives back")
    parser.add_argument("--canned", type=Path, help="folder with one answer per method of the Open Inference Protocol")
    given = parser.parse_args()
    answer = b"" if given.answer is None else given.answer.read_bytes()
    asyncio.run(_serve(answer, _Canned(given.canned)))


if __name__ == "__main__":
    main()
