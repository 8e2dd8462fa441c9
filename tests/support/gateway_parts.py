"""Fakes with the ports' names, to drive the gateway's parts without processes: a router, pool processes, a pipeline."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gateway.batcher import BatchLimits
from gateway.pool_processes import OnLost, OnMessage
from gateway.served import ServedModel
from gateway.state import ModelState
from gateway.worker_client import Worker, WorkerClient
from shared.messages import (
    PROTOCOL_VERSION,
    BatchDone,
    Failure,
    FromPool,
    FromWorker,
    Hello,
    ItemAnswer,
    JobFailed,
    ModelLoaded,
    OpenPipeline,
    PoolReady,
    PrepareJob,
    RunBatch,
    ToPool,
    ToWorker,
    Welcome,
    WorkerReady,
)
from shared.messages import Prepared as PreparedJob
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Result, Text
from shared.tensors import Array, Tensor, TensorSpec

GENERATION = 7


class WordPipeline(Pipeline[Options]):
    """Text in; one byte tensor to the worker and back; the text of these bytes out."""

    postprocess_is_trivial = True

    def __init__(self, nbytes: int = 4) -> None:
        super().__init__(Config(), Path(), ())
        self._nbytes = nbytes

    @property
    def spec(self) -> PipelineSpec:
        tensor = TensorSpec(name="x", datatype="UINT8", shape=(self._nbytes,))
        return PipelineSpec(kind="text", inputs=(tensor,), outputs=(tensor,))

    def preprocess(self, item: RawInput, options: Options, out: list[Array]) -> Prepared:
        out[0][:] = np.frombuffer(bytes(item.data), np.uint8)
        return Prepared(tensors=out)

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: Options) -> list[Result]:
        return [Text(row.tobytes().decode()) for row in outputs[0]]

    def example(self) -> RawInput:
        return RawInput(kind="text", data=b"x" * self._nbytes)


def served(
    number: int = 1, *, name: str = "words", max_rows: int = 4, max_wait_s: float = 0.005, nbytes: int = 4
) -> ServedModel:
    """A ready model with the word pipeline."""
    sizes = tuple(sorted({1, min(2, max_rows), max_rows}))
    state = ModelState(name, "0123456789abcdef", "ready")
    return ServedModel(number, state, WordPipeline(nbytes), BatchLimits(max_rows, max_wait_s, sizes))


class FakeRouter:
    """Keeps what was sent; `full` makes every send fail."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, ToWorker]] = []
        self.full = False
        self.was_sent = asyncio.Event()
        self.bad_frames = self.stale_frames = 0

    def send(self, identity: bytes, message: ToWorker) -> bool:
        if self.full:
            return False
        self.sent.append((identity, message))
        self.was_sent.set()
        return True

    def batches(self) -> list[RunBatch]:
        """All batches sent so far."""
        return [message for _, message in self.sent if isinstance(message, RunBatch)]

    def close(self) -> None:
        """Nothing to close."""


def connect_worker(workers: WorkerClient, *models: int, name: str = "worker-0", pid: int = 1) -> Worker:
    """Greet as a worker that has loaded these models, each batch taking a millisecond."""
    welcome = workers.on_hello(Hello(PROTOCOL_VERSION, pid, name, "cpu"), pid)
    if not isinstance(welcome, Welcome):
        raise TypeError(welcome)
    workers.on_message(welcome.identity, WorkerReady())
    for model in models:
        workers.on_message(welcome.identity, ModelLoaded(model, [(1, 0.001), (4, 0.001)], 10, "fp32", 0.1, pads=False))
    return next(worker for worker in workers.workers() if worker.identity == welcome.identity)


def done(batch: RunBatch, now_s: float = 0.0) -> FromWorker:
    """The answer that gives every item its own input back."""
    answers = [ItemAnswer(item.item, item.tensors) for item in batch.items]
    return BatchDone(batch.batch, answers, now_s, 0.0, 0.001, sum(item.rows for item in batch.items))


def welcome(identity: bytes) -> Welcome:
    """A greeting of this test's gateway."""
    return Welcome(PROTOCOL_VERSION, GENERATION, "ipc://nowhere", identity, 1)


class FakeProcesses:
    """Pool processes that answer only when the test says so."""

    def __init__(self, *identities: bytes) -> None:
        self._ready = list(identities)
        self.sent: list[tuple[bytes, ToPool]] = []
        self.killed: list[bytes] = []
        self.opened: list[OpenPipeline] = []
        self._on_message: OnMessage = lambda _i, _m: None
        self._on_lost: OnLost = lambda _i: None

    def connect(self, on_message: OnMessage, on_lost: OnLost) -> None:
        self._on_message, self._on_lost = on_message, on_lost

    def open(self, message: OpenPipeline) -> None:
        self.opened.append(message)

    def ready(self) -> Iterable[bytes]:
        return list(self._ready)

    def send(self, identity: bytes, message: ToPool) -> bool:
        self.sent.append((identity, message))
        return True

    def kill(self, identity: bytes) -> None:
        self.killed.append(identity)

    def answer(self, identity: bytes, message: FromPool) -> None:
        """A message arrives from this process."""
        self._on_message(identity, message)

    def die(self, identity: bytes, successor: bytes | None = None) -> None:
        """The process is gone; its successor is ready at once."""
        self._ready.remove(identity)
        if successor is not None:
            self._ready.append(successor)
        self._on_lost(identity)
        if successor is not None:
            self._on_message(successor, PoolReady())


class AnsweringProcesses(FakeProcesses):
    """Pool processes that run the word pipeline at once; a payload of `bad!` is refused, `die!` is never answered."""

    def __init__(self, pipeline: WordPipeline) -> None:
        super().__init__(b"pool-0.1")
        self._pipeline = pipeline
        self.prepared = 0

    def send(self, identity: bytes, message: ToPool) -> bool:
        super().send(identity, message)
        if isinstance(message, PrepareJob) and message.payload != b"die!":
            self.prepared += 1
            answer: FromPool = PreparedJob(message.job, [Tensor("x", "UINT8", (1, 4), _bytes(message))], b"\x80", 0.0)
            if message.payload == b"bad!":
                answer = JobFailed(message.job, Failure("invalid_input", "a bad word"))
            asyncio.get_running_loop().call_soon(self.answer, identity, answer)
        return True


def _bytes(message: PrepareJob) -> bytes:
    if isinstance(message.payload, bytes):
        return message.payload
    raise TypeError("payload lies in the arena")


class AnsweringRouter(FakeRouter):
    """A worker that answers each batch on the loop's next turn, until told to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: WorkerClient | None = None
        self.hold = False

    def send(self, identity: bytes, message: ToWorker) -> bool:
        accepted = super().send(identity, message)
        if accepted and isinstance(message, RunBatch) and not self.hold and self.workers is not None:
            asyncio.get_running_loop().call_soon(self.workers.on_message, identity, done(message))
        return accepted
