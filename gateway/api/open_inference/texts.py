"""Generated text in the protocol's form: the parts of one that grows, and what is told of its end."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from gateway import request as flow
from gateway.api.open_inference import datatypes
from gateway.api.open_inference.model import InferOutput, InferRequest, InferResponse, Parameters
from gateway.api.open_inference.models import TEXT_OUTPUT
from shared.errors import InvalidInput
from shared.results import Text, TextEnd, Token
from shared.tensors import pack_bytes

LOGPROBS = "logprobs"
"""The option, and the answer's parameter that has its tokens: id, text, bytes, logprob, and alternatives if any."""


class Reader(Protocol):
    """Who takes a text while it grows."""

    def begins(self) -> None:
        """The request is for a text: all its answers come here, unless it is refused."""

    async def part(self, answer: InferResponse) -> None:
        """One of them."""


def writer(request: InferRequest, reader: Reader) -> flow.Write:
    """What the flow writes a text's parts to: each is an answer of its own."""
    reader.begins()

    async def written(part: flow.Part) -> None:
        data = pack_bytes([part.text.encode()])
        output = InferOutput(TEXT_OUTPUT, datatypes.BYTES, (1, 1), data, {})
        facts = _told(part.tokens) if part.end is None else _facts(part.end) | _told(part.tokens)
        final = part.end is not None
        await reader.part(InferResponse(part.model, part.version, request.id, [output], facts, final))

    return written


def facts_of(answer: flow.Answer) -> Parameters:
    """Of a request for one text: where and why it ended, and its tokens. Nothing of any other one."""
    (first, *more) = answer.results
    if not isinstance(first, Text) or first.end is None or more:
        return {}
    return _facts(first.end) | _told(first.tokens)


def check_asked(options: Mapping[str, Any], rows: int) -> None:
    """Raises InvalidInput for what could not be told of texts side by side."""
    if rows > 1 and options.get(LOGPROBS) is not None:
        raise InvalidInput(f"parameter {LOGPROBS} is for requests of one text; this one has {rows}")


def _told(tokens: Sequence[Token]) -> Parameters:
    """As JSON, since the protocol's parameters are single values; nothing where none were asked for."""
    return {LOGPROBS: msgspec.json.encode([_token(one) for one in tokens]).decode()} if tokens else {}


def _token(one: Token) -> dict[str, Any]:
    told = {"id": one.id, "text": one.data.decode(errors="replace"), "bytes": list(one.data), "logprob": one.logprob}
    return told | ({"alternatives": [_token(other) for other in one.alternatives]} if one.alternatives else {})


def _facts(end: TextEnd) -> Parameters:
    return {
        "finish_reason": end.reason.value,
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
    }
