"""Slot → pipeline hook → slot: runs the pool-side hooks of pipelines, and turns whatever they do into one answer."""

import time
from typing import Any

import msgspec

from preprocess_pool.failures import Traces, describe, fault_of_input, refusal
from preprocess_pool.placing import Placing, check_results, check_tensors
from shared.arena import AttachedArena
from shared.clock import Clock, now_s
from shared.errors import DeadlineExceeded, HeadraceError, InternalFault, TooLarge
from shared.messages import (
    ClosePipeline,
    Failure,
    Finished,
    FinishJob,
    JobFailed,
    OpenPipeline,
    PipelineOpened,
    PipelineRefused,
    Prepared,
    PrepareJob,
)
from shared.pipeline import Options, Pipeline, RawInput
from shared.pipeline import Prepared as PreparedInput
from shared.pipeline_loader import load_pipeline
from shared.repository import Repository
from shared.results import Result
from shared.tensors import Array, RawTensor, SlotRef, Tensor, as_array

_NO_CONTEXT = msgspec.msgpack.encode({})
_encode = msgspec.msgpack.Encoder().encode
_decode_context = msgspec.msgpack.Decoder(dict[str, Any]).decode


_encode_results = msgspec.msgpack.Encoder().encode
_decode_results = msgspec.msgpack.Decoder(list[Result]).decode


def _as_on_the_wire(results: list[Result]) -> list[Result]:
    """What the gateway will read.

    Raises TypeError or ValidationError for a field of a wrong type (a numpy number, a missing name): the pipeline's
    mistake, found here, where it costs its own request only.
    """
    return _decode_results(_encode_results(results))


class _Opened:
    """A pipeline with what each of its jobs needs, built once."""

    __slots__ = ("options", "pipeline", "placing", "traces")

    def __init__(self, pipeline: Pipeline[Any], arena: AttachedArena, traces: Traces) -> None:
        self.pipeline = pipeline
        self.traces = traces
        self.options: msgspec.msgpack.Decoder[Options] = msgspec.msgpack.Decoder(pipeline.options_type)
        self.placing = Placing(pipeline.spec.inputs, arena)


class Stage:
    """The pipelines that were opened here, and the arena that they read and write."""

    def __init__(self, arena: AttachedArena, repository: Repository, clock: Clock = now_s) -> None:
        self._arena = arena
        self._repository = repository
        self._clock = clock
        self._opened: dict[int, _Opened] = {}
        self._traces = Traces("unknown", clock)
        """Of what is no one model's."""

    def open(self, message: OpenPipeline) -> PipelineOpened | PipelineRefused:
        """Build a version's pipeline. A refusal carries the reason in one sentence."""
        traces = Traces(message.name, self._clock)
        try:
            self._repository.refresh()  # the version may be newer than this process
            version = self._repository.open(message.name, message.version, message.config or None)
            pipeline = load_pipeline(version, torch_allowed=False)
            pipeline.open()
            self._opened[message.model] = _Opened(pipeline, self._arena, traces)
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            return PipelineRefused(message.model, refusal(error, traces))
        return PipelineOpened(message.model)

    def close(self, message: ClosePipeline) -> None:
        """Forget a pipeline."""
        self._opened.pop(message.model, None)

    def prepare(self, job: PrepareJob) -> Prepared | JobFailed:
        """Run `preprocess` for one item, straight into its slots where the shapes are fixed."""
        started_s = time.perf_counter()
        try:
            self._check_deadline(job)
            opened = self._of(job.model)
            out = opened.placing.buffers(job.slots)
            options = opened.options.decode(job.options)
            prepared = self._preprocess(opened, self._raw(job), options, out)
            tensors = opened.placing.place(prepared.tensors, out, job.slots)
            context = _encode(prepared.context) if prepared.context else _NO_CONTEXT
        except Exception as error:  # noqa: BLE001 - every job gets its answer
            return JobFailed(job.job, self._describe(error, "prepare", job))
        return Prepared(job.job, tensors, context, time.perf_counter() - started_s)

    def finish(self, job: FinishJob) -> Finished | JobFailed:
        """Run `postprocess` for one item."""
        try:
            self._check_deadline(job)
            opened = self._of(job.model)
            arrays = [as_array(tensor, self._arena.memory) for tensor in job.tensors]
            check_tensors(arrays, opened.pipeline.spec.outputs)
            options = opened.options.decode(job.options)
            results = opened.pipeline.postprocess(arrays, _decode_context(job.context), options)
            check_results(results, arrays)
            results = _as_on_the_wire(results)
        except Exception as error:  # noqa: BLE001 - every job gets its answer
            return JobFailed(job.job, self._describe(error, "finish", job))
        return Finished(job.job, results)

    def too_big(self, job: PrepareJob | FinishJob) -> JobFailed:
        """The answer instead of one that no message can carry."""
        stage = "prepare" if isinstance(job, PrepareJob) else "finish"
        error = TooLarge("the result is larger than one message between the server's processes can be")
        return JobFailed(job.job, self._describe(error, stage, job))

    def _describe(self, error: Exception, stage: str, job: PrepareJob | FinishJob) -> Failure:
        opened = self._opened.get(job.model)
        return describe(error, stage, opened.traces if opened is not None else self._traces)

    def _check_deadline(self, job: PrepareJob | FinishJob) -> None:
        if self._clock() >= job.deadline_s:
            stage = "preparation" if isinstance(job, PrepareJob) else "postprocessing"
            raise DeadlineExceeded(f"the deadline passed before {stage} started")

    def _of(self, model: int) -> _Opened:
        opened = self._opened.get(model)
        if opened is None:
            raise InternalFault
        return opened

    @staticmethod
    def _preprocess(opened: _Opened, raw: RawInput, options: Options, out: list[Array]) -> PreparedInput:
        try:
            return opened.pipeline.preprocess(raw, options, out)
        except HeadraceError:
            raise
        except Exception as error:
            foreseen = fault_of_input(error, raw.kind, opened.traces)
            if foreseen is None:
                raise
            raise foreseen from error

    def _raw(self, job: PrepareJob) -> RawInput:
        payload = job.payload
        data = self._view(payload) if isinstance(payload, SlotRef) else payload
        return RawInput(kind=job.kind, data=data, tensors=tuple(map(self._inline, job.tensors)))  # type: ignore[arg-type]  # the gateway has checked the kind

    def _view(self, ref: SlotRef) -> memoryview:
        end = ref.offset + ref.nbytes
        if ref.offset < 0 or ref.nbytes < 0 or end > len(self._arena.memory):
            raise ValueError(f"slot {ref.offset}+{ref.nbytes} is outside the arena")
        return self._arena.memory[ref.offset : end].toreadonly()

    def _inline(self, tensor: Tensor) -> RawTensor:
        """Hooks never see arena addresses, only bytes or a read-only view of them."""
        data = self._view(tensor.data) if isinstance(tensor.data, SlotRef) else tensor.data
        return RawTensor(tensor.name, tensor.datatype, tensor.shape, data)
