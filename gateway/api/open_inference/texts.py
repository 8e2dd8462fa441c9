"""Generated text in the protocol's form: the parts of one that grows, and what is told of its end."""

from typing import Protocol

from gateway import request as flow
from gateway.api.open_inference import datatypes
from gateway.api.open_inference.model import InferOutput, InferRequest, InferResponse, Parameters
from gateway.api.open_inference.models import TEXT_OUTPUT
from shared.results import Text, TextEnd
from shared.tensors import pack_bytes


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
        facts = {} if part.end is None else _facts(part.end)
        final = part.end is not None
        await reader.part(InferResponse(part.model, part.version, request.id, [output], facts, final))

    return written


def facts_of(answer: flow.Answer) -> Parameters:
    """Of a request for one text: where and why it ended. Nothing of any other one."""
    (first, *more) = answer.results
    return _facts(first.end) if isinstance(first, Text) and first.end is not None and not more else {}


def _facts(end: TextEnd) -> Parameters:
    return {
        "finish_reason": end.reason.value,
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
    }
