"""Served models and a whole OpenInference over a fake flow: what the gateway's composition makes, without processes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from gateway.api.open_inference.detections import finds_boxes
from gateway.api.open_inference.infer import Infer
from gateway.api.open_inference.repository import ModelControl, Repository
from gateway.api.open_inference.service import OpenInference
from gateway.api.server import RunningGrpc, start_grpc
from gateway.batcher import BatchLimits
from gateway.request import Answer, Part, Request, Write
from gateway.served import ServedModel
from gateway.state import ModelState
from gateway.statistics import Statistics
from shared.errors import HeadraceError, ProcessLost
from shared.pipelines._yolo import YoloRows
from shared.pipelines.image_classification import ImageClassification, ImageClassificationConfig
from shared.pipelines.object_detection import ObjectDetection, ObjectDetectionConfig
from shared.pipelines.tensor import DeclaredTensor, TensorConfig, TensorPipeline
from shared.results import Classification, Detection, Detections, FinishReason, Label, Tensors, Text, TextEnd, Token
from shared.results import Result as FlowResult
from shared.settings import Settings
from shared.tensors import RawTensor, Tensor
from tests.support.fake_flow import VERSION, State, settings

LIMITS = BatchLimits(max_rows=8, max_wait_s=0.002, sizes=(1, 8))


def tensor_model(
    name: str, inputs: list[DeclaredTensor], outputs: list[DeclaredTensor], labels: tuple[str, ...] = ()
) -> ServedModel:
    """A model with raw tensors in and out."""
    pipeline = TensorPipeline(TensorConfig(inputs=tuple(inputs), outputs=tuple(outputs)), Path(), labels)
    return ServedModel(1, ModelState(name=name, version=VERSION, phase="ready"), pipeline, LIMITS)


def declared(name: str, datatype: str, *shape: int) -> DeclaredTensor:
    """One input or output."""
    return DeclaredTensor(name=name, datatype=datatype, shape=shape)


def classifier(name: str = "classifier", classes: int = 4) -> ServedModel:
    """A model with an image in and labels out."""
    labels = tuple(f"label {number}" for number in range(classes))
    pipeline = ImageClassification(ImageClassificationConfig(size=8), Path(), labels)
    return ServedModel(2, ModelState(name=name, version=VERSION, phase="ready"), pipeline, LIMITS)  # type: ignore[arg-type]  # as the loader gives it


def detector(name: str = "detector") -> ServedModel:
    """A model with an image in and boxes out."""
    config = ObjectDetectionConfig(size=8, head=YoloRows())
    pipeline = ObjectDetection(config, Path(), ("cat", "dog"))
    return ServedModel(3, ModelState(name=name, version=VERSION, phase="ready"), pipeline, LIMITS)  # type: ignore[arg-type]  # as the loader gives it


def identity_models() -> list[ServedModel]:
    """The models that the tests use."""
    return [
        tensor_model("identity", [declared("INPUT0", "FP32", 16)], [declared("OUTPUT0", "FP32", 16)]),
        tensor_model("bytes", [declared("INPUT0", "BYTES", 1)], [declared("OUTPUT0", "BYTES", 1)]),
        tensor_model("free", [declared("INPUT0", "FP32", -1, 2)], [declared("OUTPUT0", "FP32", -1, 2)]),
        tensor_model(
            "pair",
            [declared("INPUT0", "INT32", 4), declared("INPUT1", "INT32", 4)],
            [declared("OUTPUT0", "INT32", 4), declared("OUTPUT1", "INT32", 4)],
            ("a", "b", "c", "d"),
        ),
        classifier(),
    ]


class Models:
    """What `gateway.routing.Routing` is to the edge."""

    def __init__(self, models: list[ServedModel]) -> None:
        self.served = models

    def models(self) -> list[ServedModel]:
        """All of them."""
        return self.served


class Echo:
    """A flow that answers each model's inputs as its outputs, in order; `fail`, `gate` and `delay_s` as a test asks."""

    def __init__(self, models: Models, statistics: Statistics) -> None:
        self._models = models
        self._statistics = statistics
        self.requests: list[Request] = []
        self.cancelled = 0
        self.running = 0
        self.fail: HeadraceError | None = None
        self.gate: asyncio.Event | None = None
        self.steps: asyncio.Queue[None] | None = None
        self.breaks = ""
        self.delay_s: Callable[[Request], float] = lambda _: 0.0
        self._changed = asyncio.Condition()

    async def answer(self, request: Request) -> Answer:
        """Tensors as they came, as bytes of their own; images are classified by their first byte."""
        self.requests.append(request)
        self.running += 1
        await self._tell()
        try:
            if self.gate is not None:
                await self.gate.wait()
            if delay_s := self.delay_s(request):
                await asyncio.sleep(delay_s)  # the latency that the test asked for
            if self.fail is not None:
                raise self.fail
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            await asyncio.shield(self._tell())
        request.times.run_s, request.times.version = 0.002, VERSION
        model = next(one for one in self._models.models() if one.name == request.model)
        rows = sum(raw.rows for raw in request.inputs)
        self._statistics.of(model.name, model.version).succeeded(
            time.monotonic() - request.arrived_s, request.times, rows
        )
        self._statistics.of(model.name, model.version).ran(rows, 0.001, 0.002)
        if request.write is not None:
            await self._grow(request, request.write)
        results: list[FlowResult | HeadraceError] = [
            _echoed(model, request, number) for number in range(len(request.inputs))
        ]
        return Answer(model.name, VERSION, results)

    async def _grow(self, request: Request, write: Write) -> None:
        """The text in capitals, a letter at a time; `steps` says when, and after which letter it `breaks`."""
        letters = bytes(request.inputs[0].data).decode().upper()
        for place, letter in enumerate(letters, 1):
            if self.steps is not None:
                await self.steps.get()
            if letter == self.breaks:
                raise ProcessLost("the worker was lost")
            end = TextEnd(FinishReason.LENGTH, len(letters), place) if place == len(letters) else None
            await write(Part(request.model, VERSION, letter, _tokens(request, letter), end))

    async def until(self, wanted: Callable[["Echo"], bool], what: str, limit_s: float = 5.0) -> None:
        """Wait for a state of the fake; the failure says what was awaited."""
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(lambda: wanted(self))
        except TimeoutError:
            raise AssertionError(
                f"waited {limit_s} s for {what}: {len(self.requests)} requests, {self.running} running, "
                f"{self.cancelled} cancelled"
            ) from None

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _echoed(model: ServedModel, request: Request, number: int) -> FlowResult:
    raw = request.inputs[number]
    if raw.kind == "tensors":
        return Tensors(
            [_as_output(spec.name, tensor) for spec, tensor in zip(model.spec.outputs, raw.tensors, strict=True)]
        )
    first = raw.data[0]
    if finds_boxes(model.spec):
        return Detections([Detection(Label(first % 2, "cat", 0.5), 1.5, 2.5, 30.0, 40.0)], 80, 60)
    if model.pipeline.generates:
        text = bytes(raw.data).decode().upper()
        return Text(text, TextEnd(FinishReason.LENGTH, len(text), len(text)), _tokens(request, text))
    k = int(request.options.get("top_k", 5))
    best = [Label((first + place) % 4, f"label {(first + place) % 4}", 0.5 / (place + 1)) for place in range(min(k, 4))]
    return Classification(best)


def _tokens(request: Request, letters: str) -> list[Token]:
    """A letter each, where they are asked for."""
    asked = "logprobs" in request.options
    return [Token(ord(letter), letter.encode(), -0.5) for letter in letters] if asked else []


def _as_output(name: str, tensor: RawTensor) -> Tensor:
    return Tensor(name, tensor.datatype, tensor.shape, bytes(tensor.data))


class Stack:
    """Everything behind the edge."""

    def __init__(self, chosen: Settings | None = None, control: ModelControl | None = None) -> None:
        self.settings = chosen or settings()
        self.models = Models([*identity_models(), detector()])
        self.statistics = Statistics()
        self.flow = Echo(self.models, self.statistics)
        self.state = State()
        self.state.known = [model.state for model in self.models.served]
        self.infer = Infer(self.flow, self.models, self.settings, self.statistics)
        repository = Repository(self.state, control, allowed=self.settings.gateway.repository_control)
        self.parts = OpenInference(self.infer, self.models, self.statistics, self.state, repository)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[RunningGrpc]:
        """A real gRPC server on a free port of this process's event loop."""
        running = await start_grpc(self.settings, self.flow, self.state, None, self.parts)
        try:
            yield running
        finally:
            await running.stop(0.0)
