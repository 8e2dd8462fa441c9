"""Calls through grpc.aio, as clients in Python make them, without a task of ours for a call."""

import asyncio
from functools import partial
from typing import Any

import grpc
import grpc.aio

from bench.ledger import OK, word
from bench.wire import REASON, TIMING, Ended, Target, connecting

_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
_Call = Any  # grpc.aio's UnaryUnaryCall, whose callbacks its stubs type as Any


class GrpcWire:
    """One channel a connection, used in turn. The event loop's thread only."""

    def __init__(self, target: Target, ended: Ended) -> None:
        self.samples: dict[str, str] = {}
        """By word: the text of the first status."""
        self._target = target
        self._ended = ended
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = []

    async def open(self) -> None:
        """Connect. Raises NotThere."""
        target = self._target
        self._channels = [grpc.aio.insecure_channel(target.address, options=_OPTIONS) for _ in range(target.channels)]
        self._stubs = [channel.unary_unary(target.method) for channel in self._channels]
        async with connecting(target.address):
            await asyncio.gather(*(channel.channel_ready() for channel in self._channels))

    def send(self, index: int, request: bytes, left_s: float) -> None:
        """Begin a call; `ended` is told its end."""
        call: _Call = self._stubs[index % len(self._stubs)](request, timeout=left_s)
        call.add_done_callback(partial(self._done, index))

    async def close(self) -> None:
        """Drop the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def _done(self, index: int, call: _Call) -> None:
        code: grpc.StatusCode = _at_once(call.code())
        fine = code is grpc.StatusCode.OK
        if fine and not self._target.stages:
            self._ended(index, OK, "")
            return
        trailers = _at_once(call.trailing_metadata()) or {}
        outcome = OK if fine else word(code.name, trailers.get(REASON, ""))
        if not fine and outcome not in self.samples:
            self.samples[outcome] = _at_once(call.details()) or code.name
        self._ended(index, outcome, trailers.get(TIMING, ""))


def _at_once(ready: Any) -> Any:  # noqa: ANN401 - whatever the call knows
    """What a coroutine of an ended call returns: it has nothing to wait for, so no task is needed."""
    try:
        ready.send(None)
    except StopIteration as found:
        return found.value
    raise RuntimeError("an ended call had to wait for its status")
