"""What stands behind a gateway's sockets where texts are generated, played: a pipeline, a pool and workers.

The pool makes a token of each byte. The workers write the prompt's letters in capitals, over and over, one a step; a
text that comes to a `.` has ended. They step when the test says so, or by themselves (`steps_by_itself`), and note
whenever more was sent to one than its limits allow.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gateway.batcher import BatchLimits
from gateway.served import ServedModel
from gateway.state import ModelState
from gateway.worker_client import WorkerClient
from shared.generation import GenerationOptions
from shared.generation_messages import CancelJobs, Generate, Generated, Piece
from shared.messages import Failure, JobFailed, PrepareJob, ToPool, ToWorker
from shared.messages import Prepared as PreparedJob
from shared.model_messages import GenerationLimits
from shared.pipeline import Config, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import FinishReason, Result, TextEnd, Token
from shared.tensors import Array, Tensor, TensorSpec
from tests.support.gateway_parts import FakeProcesses, FakeRouter

VERSION = "0123456789abcdef"
CONTEXT = 32


class TextPipeline(Pipeline[GenerationOptions]):
    """A token is a byte."""

    generates = True
    options_type = GenerationOptions
    context = CONTEXT

    def __init__(self) -> None:
        super().__init__(Config(), Path(), ())

    @property
    def spec(self) -> PipelineSpec:
        tokens = TensorSpec(name="tokens", datatype="INT32", shape=(-1,))
        return PipelineSpec(kind="text", also=("chat",), inputs=(tokens,), outputs=())

    def preprocess(self, item: RawInput, options: GenerationOptions, out: list[Array]) -> Prepared:
        return Prepared([np.frombuffer(bytes(item.data), np.uint8).astype(np.int32)[np.newaxis]])

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: GenerationOptions) -> list[Result]:
        raise NotImplementedError

    def example(self) -> RawInput:
        return RawInput(kind="text", data=b"ab")


def text_model(number: int = 1, name: str = "writer", *, on_demand: bool = False) -> ServedModel:
    """A ready one."""
    state = ModelState(name, VERSION, "ready", on_demand=on_demand)
    return ServedModel(number, state, TextPipeline(), BatchLimits(4, 0.0, (1, 4)))  # type: ignore[arg-type]  # as the loader gives it


class Pool(FakeProcesses):
    """Makes tokens at once; refuses `bad!`, and leaves what is in `silent` unanswered."""

    def __init__(self) -> None:
        super().__init__(b"pool-0.1")
        self.silent: set[bytes] = set()

    def send(self, identity: bytes, message: ToPool) -> bool:
        super().send(identity, message)
        if (
            isinstance(message, PrepareJob)
            and isinstance(message.payload, bytes)
            and message.payload not in self.silent
        ):
            tokens = np.frombuffer(message.payload, np.uint8).astype("<i4")
            tensor = Tensor("tokens", "INT32", (1, len(tokens)), tokens.tobytes())
            answer: Any = PreparedJob(message.job, [tensor], b"\x80", 0.001)
            if message.payload == b"bad!":
                answer = JobFailed(message.job, Failure("invalid_input", "a bad prompt"))
            asyncio.get_running_loop().call_soon(self.answer, identity, answer)
        return True


class Writing:
    """One text at a played worker."""

    def __init__(self, message: Generate) -> None:
        self.message = message
        self.options = msgspec.msgpack.decode(message.options, type=GenerationOptions)
        self.prompt = np.frombuffer(message.prompt, "<i4")
        self.tokens = 0
        self.cancelled = False

    @property
    def rows(self) -> int:
        return self.options.beams

    @property
    def length(self) -> int:
        return min(len(self.prompt) + self.options.max_tokens, CONTEXT)

    def next(self) -> Piece | None:
        """What the next step brings."""
        job = self.message.job
        if self.cancelled:
            return Piece(job, failure=Failure("cancelled", "the caller has left"))
        letter = chr(self.prompt[self.tokens % len(self.prompt)]).upper()
        self.tokens += 1
        most = self.length - len(self.prompt)
        reason = FinishReason.END_TOKEN if letter == "." else FinishReason.LENGTH if self.tokens >= most else None
        end = None if reason is None else TextEnd(reason, len(self.prompt), self.tokens)
        if self.rows > 1:  # a beam search knows its text at its end
            whole = "".join(chr(self.prompt[place % len(self.prompt)]).upper() for place in range(self.tokens))
            return Piece(job, whole, [], end) if end is not None else None
        told = [Token(ord(letter), letter.encode(), -0.5)] if self.options.logprobs is not None else []
        return Piece(job, "" if letter == "." else letter, told, end, count=self.tokens)


class Writers(FakeRouter):
    """The played workers."""

    def __init__(self, sequences: int, tokens: int) -> None:
        super().__init__()
        self.client: WorkerClient
        self.limits = GenerationLimits(sequences, tokens, 0.001, 0.0001)
        self.writing: dict[bytes, dict[int, Writing]] = {}
        self.too_much: list[str] = []
        self.steps_by_itself = True
        self.order: list[str] = []
        """Prompts, as they were begun."""
        self._stepping = False

    def send(self, identity: bytes, message: ToWorker) -> bool:
        accepted = super().send(identity, message)
        if not accepted:
            return False
        held = self.writing.setdefault(identity, {})
        if isinstance(message, Generate):
            held[message.job] = writing = Writing(message)
            self.order.append("".join(map(chr, writing.prompt)))
            rows = sum(one.rows for one in held.values())
            tokens = rows * max(one.length for one in held.values())
            if rows > self.limits.sequences or tokens > self.limits.tokens:
                self.too_much.append(f"{rows} sequences, {tokens} tokens")
        elif isinstance(message, CancelJobs):
            for job in message.jobs:
                if job in held:
                    held[job].cancelled = True
        if self.steps_by_itself and not self._stepping and isinstance(message, Generate | CancelJobs):
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._by_itself)
        return True

    def _by_itself(self) -> None:
        self._stepping = False
        self.step()
        if self.steps_by_itself and any(self.writing.values()) and not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._by_itself)

    def step(self, count: int = 1) -> None:
        """All workers take so many steps."""
        for _ in range(count):
            for identity, held in list(self.writing.items()):
                pieces = [piece for one in list(held.values()) if (piece := one.next()) is not None]
                for piece in pieces:
                    if piece.end is not None or piece.failure is not None:
                        held.pop(piece.job)
                if pieces:
                    self.client.on_message(identity, Generated(pieces))

    def under_way(self) -> int:
        """Texts that workers have."""
        return sum(map(len, self.writing.values()))

    def cancels(self) -> list[int]:
        """Jobs that were cancelled."""
        return [job for _, message in self.sent if isinstance(message, CancelJobs) for job in message.jobs]
