"""What the admin service's streams have in common."""

from typing import TypeVar

import grpc

from gateway.api.interceptors import Call, Edge, Parse
from shared.errors import InvalidInput

_Message = TypeVar("_Message")


async def only_message(edge: Edge, call: Call, parse: Parse[_Message]) -> _Message:
    """The one message that a caller sends. Raises InvalidInput."""
    raw = await call.context.read()
    if raw is grpc.aio.EOF:
        raise InvalidInput("the request message is missing")
    return edge.parse(parse, raw)
