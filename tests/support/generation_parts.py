"""A gateway's core with a model of texts; only the processes on the other side of its sockets are played.

The played pool makes a token of each byte. The played workers write the prompt's letters in capitals, over and over,
one a step; a text that comes to a `.` has ended. They step when the test says so, or by themselves
(`steps_by_itself`), and note whenever more was sent to one than its limits allow.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gateway.admission import Admission
from gateway.batcher import Batcher, BatchLimits
from gateway.cost_model import CostModel
from gateway.dispatch import Dispatcher
from gateway.flow import Door, Flow
from gateway.forecast import Forecast
from gateway.generation import Ticket
from gateway.generation_driver import Generation
from gateway.generation_metrics import GenerationMetrics
from gateway.inflight import InFlight
from gateway.leases import Leases
from gateway.metrics import Metrics
from gateway.pool_client import PoolClient, PoolJob
from gateway.quarantine import Quarantine
from gateway.request import Answer, Part, Request, Write
from gateway.routing import Routing
from gateway.served import ServedModel
from gateway.state import ModelState
from gateway.work import Work
from gateway.worker_client import Worker, WorkerClient
from shared.arena import Arena
from shared.clock import now_s
from shared.generation import GenerationOptions
from shared.generation_messages import CancelJobs, Generate, Generated, Piece
from shared.messages import (
    PROTOCOL_VERSION,
    Failure,
    Hello,
    JobFailed,
    ModelEvicted,
    ModelLoaded,
    PrepareJob,
    ToPool,
    ToWorker,
    Welcome,
    WorkerReady,
)
from shared.messages import Prepared as PreparedJob
from shared.model_messages import GenerationLimits
from shared.pipeline import Config, Kind, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import FinishReason, Result, Text, TextEnd, Token
from shared.settings import AdmissionSettings, WorkerSettings
from shared.tensors import Array, Tensor, TensorSpec
from tests.support.gateway_parts import FakeProcesses, FakeRouter, welcome

LIMIT_S = 5.0
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
        return Piece(job, "" if letter == "." else letter, told, end)


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


class TextWorld:
    """One gateway's core, its worker greeted."""

    def __init__(self, sequences: int = 4, tokens: int = 128, **worker: Any) -> None:  # noqa: ANN401 - settings by name
        self.arena = Arena.create(1 << 20)
        self.model = text_model()
        self.router = Writers(sequences, tokens)
        self.workers = self.router.client = WorkerClient(self.router, welcome)  # type: ignore[arg-type]  # a fake with the port's names
        cost, settings = CostModel(), WorkerSettings(**worker)
        self.dispatch = Dispatcher(Batcher(cost.predict), cost, self.workers, InFlight[Work](), settings)
        self.leases = Leases(self.arena, 1024, 3)
        self.admission = Admission(AdmissionSettings(max_requests=64, max_rows=64))
        self.pool_side = Pool()
        self.pool = PoolClient(self.pool_side, InFlight[PoolJob](), lambda _m, _e: None)  # type: ignore[arg-type]  # a fake
        self.metrics = Metrics()
        routing = Routing([self.model])
        self.quarantine = Quarantine()
        door = Door(self.admission, Forecast(1, routing), self.quarantine)
        self.flow = Flow(door, routing, self.leases, self.pool, self.dispatch, self.metrics)
        self.generation = self.flow.generation = Generation(self.workers, settings, self.metrics.drops)
        self.shown = GenerationMetrics(self.metrics, self.generation)
        self.workers.connect([self.dispatch, self.generation])
        self.dispatch.configure(self.model)
        self.leases.nobody_comes = self.dispatch.kick

    def greet(self, name: str = "worker-0") -> Worker:
        """A worker comes, and has loaded the model."""
        greeting = self.workers.on_hello(Hello(PROTOCOL_VERSION, 1, name, "cpu"), 1)
        if not isinstance(greeting, Welcome):
            raise TypeError(greeting)
        self.workers.on_message(greeting.identity, WorkerReady())
        self.load(greeting.identity)
        return next(worker for worker in self.workers.workers() if worker.identity == greeting.identity)

    def load(self, identity: bytes) -> None:
        """It answers that it has."""
        loaded = ModelLoaded(1, [], 10, "fp32", 0.1, pads=False, generation=self.router.limits)
        self.workers.on_message(identity, loaded)

    def lose(self, worker: Worker) -> None:
        """It dies with everything that it has."""
        self.router.writing.pop(worker.identity, None)
        self.workers.on_lost(worker.identity)

    def evict(self, worker: Worker) -> None:
        """It gives the model up, and with it the texts that are on their way to it."""
        self.workers.on_message(worker.identity, ModelEvicted(1))
        self.give_back(worker, "not_ready")

    def give_back(self, worker: Worker, code: str) -> None:
        """It ends all texts that it has, for this reason."""
        failure, held = Failure(code, "not here"), self.router.writing.pop(worker.identity, {})
        self.workers.on_message(worker.identity, Generated([Piece(job, failure=failure) for job in held]))

    def request(self, *prompts: str, within_s: float = LIMIT_S, kind: Kind = "text", **options: Any) -> Request:  # noqa: ANN401 - by name
        inputs = [RawInput(kind=kind, data=prompt.encode()) for prompt in prompts]
        now = now_s()
        return Request("writer", "", "id-1", inputs, options, now + within_s, now, sum(map(len, prompts)))

    async def answer(self, *prompts: str, **options: Any) -> list[Text]:  # noqa: ANN401 - by name
        """Whole texts."""
        async with asyncio.timeout(LIMIT_S):
            answer: Answer = await self.flow.answer(self.request(*prompts, **options))
        return [result for result in answer.results if isinstance(result, Text)]

    def begin(self, prompt: str, write: Write | None = None, **options: Any) -> "Reading":  # noqa: ANN401 - by name
        """A text that is read while it grows, in a task of its own."""
        return Reading(self, self.request(prompt, **options), write)

    def in_line(self) -> list[Ticket]:
        """Who waits for room."""
        return self.generation.lobby.of(self.model).places.in_line()

    async def until(self, what: str, condition: Any) -> None:  # noqa: ANN401 - a condition
        """Give the loop turns until this holds."""
        until_s = now_s() + LIMIT_S
        while not condition():
            if now_s() > until_s:
                raise AssertionError(f"waited {LIMIT_S} s for {what}; {self.generation.lobby.versions}")
            await asyncio.sleep(0)

    def at_rest(self) -> bool:
        """Nothing is held by anybody."""
        version = self.generation.lobby.versions[1]
        held = (
            self.admission.in_flight_requests,
            self.model.requests,
            self.model.rows_in_flight,
            len(self.generation.held),
        )
        return held == (0, 0, 0, 0) and version.places.is_idle and not self.arena.stats().leased_bytes

    def sample(self, name: str, **labels: str) -> float:
        """One number of `/metrics`; 0 where there is none."""
        return self.metrics.registry.get_sample_value(name, {"model": "writer", **labels}) or 0.0

    def close(self) -> None:
        """Leave nothing to the loop."""
        self.router.steps_by_itself = False
        if self.dispatch._timer is not None:
            self.dispatch._timer.cancel()
        self.arena.close()


class Reading:
    """One caller who reads along."""

    def __init__(self, world: TextWorld, request: Request, write: Write | None) -> None:
        self.parts: list[Part] = []
        self.request = request
        request.write = write or self._write
        self.task = asyncio.get_running_loop().create_task(world.flow.answer(request))

    async def _write(self, part: Part) -> None:
        self.parts.append(part)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    async def end(self) -> Answer:
        """Wait for it."""
        async with asyncio.timeout(LIMIT_S):
            return await self.task

    async def leave(self) -> None:
        """The caller goes."""
        self.task.cancel()
        await asyncio.wait([self.task])
