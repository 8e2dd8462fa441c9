"""A call's context as grpc.aio gives it to a method, without a network."""

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc


class Context:
    """Records what the method does; `incoming` is what a stream's caller sends."""

    def __init__(self, remaining_s: float | None = None) -> None:
        self.remaining_s = remaining_s
        self.trailers: dict[str, Any] = {}
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.reads = 0
        self.written: list[bytes] = []
        self.wrote = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.write_error: Exception | None = None

    def time_remaining(self) -> float | None:
        return self.remaining_s

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, Any]]) -> None:
        self.trailers = dict(metadata)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, Any]]) -> NoReturn:
        self.code, self.details, self.trailers = code, details, dict(metadata)
        raise grpc.aio.AbortError

    async def read(self) -> Any:  # noqa: ANN401 - bytes, or gRPC's end-of-stream object
        item = await self.incoming.get()
        self.reads += 1
        return item

    async def write(self, data: bytes) -> None:
        await self.writable.wait()
        if self.write_error is not None:
            raise self.write_error
        self.written.append(data)
        self.wrote.set()

    def send(self, *messages: Any) -> None:  # noqa: ANN401 - protobuf messages
        for message in messages:
            self.incoming.put_nowait(message if isinstance(message, bytes) else message.SerializeToString())

    def half_close(self) -> None:
        self.incoming.put_nowait(grpc.aio.EOF)
