"""All wire messages, grouped by direction. msgspec structs over MessagePack; nothing here is ever pickled.

Each frame starts with the sender's *generation* (see `shared.transport`): a message of a process that was since
replaced is dropped. Every job message carries a `deadline_s` of the machine-wide monotonic clock and gets exactly one
answer: its Done or its Failed message, or the death of the process that held it. Messages about loaded models are in
`shared.model_messages`, those about generated text in `shared.generation_messages`, those to the supervisor in
`shared.process_messages`.
"""

from typing import TypeAlias

from shared.generation_messages import CancelJobs, Generate, Generated
from shared.model_messages import (
    Failure,
    KeepModels,
    LoadModel,
    MemoryNote,
    Message,
    ModelEvicted,
    ModelFailed,
    ModelLoaded,
    ModelNote,
    ModelUse,
    UnloadModel,
)
from shared.process_messages import ProcessFailed, ProcessReady, ToSupervisor
from shared.results import Result
from shared.tensors import SlotRef, Tensor

__all__ = [
    "PROTOCOL_VERSION",
    "BatchDone",
    "BatchItem",
    "CancelItems",
    "ClosePipeline",
    "Failure",
    "FinishJob",
    "Finished",
    "FromPool",
    "FromWorker",
    "Hello",
    "ItemAnswer",
    "JobFailed",
    "KeepModels",
    "LoadModel",
    "MemoryNote",
    "ModelEvicted",
    "ModelFailed",
    "ModelLoaded",
    "ModelNote",
    "ModelUse",
    "OpenPipeline",
    "PipelineOpened",
    "PipelineRefused",
    "PoolReady",
    "PrepareJob",
    "Prepared",
    "ProcessFailed",
    "ProcessReady",
    "Refused",
    "RunBatch",
    "Stop",
    "ToPool",
    "ToSupervisor",
    "ToWorker",
    "UnloadModel",
    "Welcome",
    "WorkerReady",
]

PROTOCOL_VERSION = 5
"""Raised whenever a message changes; both sides refuse to talk across versions."""


# ------------------------------------------------------------------ gateway ⇄ worker, greeting (Unix stream socket)


class Hello(Message, tag="hello"):
    """Worker → gateway, first and only message of the stream. The open stream itself is the sign of life."""

    protocol_version: int
    pid: int
    worker: str
    """Stable name, e.g. `worker-0`."""
    device: str
    """What torch calls it, e.g. `cpu` or `cuda:0`; plain words for backends without a device."""


class Welcome(Message, tag="welcome"):
    """Gateway → worker, answer to Hello; the arena's descriptor rides along (SCM_RIGHTS)."""

    protocol_version: int
    generation: int
    """Random 64-bit number of this gateway's life."""
    endpoint: str
    """ZeroMQ address (`ipc://…`) for the DEALER socket."""
    identity: bytes
    """The DEALER's routing id."""
    arena_bytes: int


class Refused(Message, tag="refused"):
    """Gateway → worker: no welcome, and why (wrong protocol version, name taken)."""

    reason: str


# ------------------------------------------------------------------ gateway → pool process


class OpenPipeline(Message, tag="open"):
    """Build the pipeline of a model version, before its first job. Answered by PipelineOpened or PipelineRefused."""

    model: int
    """The gateway's number for (model name, version); used in all job messages."""
    name: str
    version: str
    config: bytes = b""
    """model.yaml, as the gateway has read it; empty: the one on the disk."""


class ClosePipeline(Message, tag="close"):
    """Forget a pipeline; no answer. No job of it follows, and none is under way."""

    model: int


class PrepareJob(Message, tag="prepare"):
    """Turn one raw input into the model's input tensors, written into `slots` (one per input spec, in order)."""

    job: int
    deadline_s: float
    model: int
    kind: str
    """`image`, `text` or `tensors`: which field of the request the payload came from."""
    payload: bytes | SlotRef
    """Encoded image bytes or UTF-8 text; empty for kind `tensors`."""
    options: bytes
    """The pipeline's options struct, MessagePack."""
    slots: list[SlotRef]
    """Where to write each input tensor, in order; empty when they travel inline."""
    tensors: list[Tensor] = []  # noqa: RUF012 - a struct copies it
    """Kind `tensors` only."""


class FinishJob(Message, tag="finish"):
    """Turn a row's output tensors into its result."""

    job: int
    deadline_s: float
    model: int
    options: bytes
    context: bytes
    """What `preprocess` returned for `postprocess` (e.g. the original size), MessagePack; opaque to the gateway."""
    tensors: list[Tensor]


class Stop(Message, tag="stop"):
    """Leave after the present job; exit code 0."""


ToPool: TypeAlias = OpenPipeline | ClosePipeline | PrepareJob | FinishJob | Stop


# ------------------------------------------------------------------ pool process → gateway


class PoolReady(Message, tag="ready"):
    """The process is up and takes jobs."""


class PipelineOpened(Message, tag="opened"):
    """The pipeline can be used."""

    model: int


class PipelineRefused(Message, tag="refused"):
    """The pipeline can't be built; the model stays not ready and says why."""

    model: int
    failure: Failure


class Prepared(Message, tag="prepared"):
    """PrepareJob's answer."""

    job: int
    tensors: list[Tensor]
    context: bytes
    elapsed_s: float


class Finished(Message, tag="finished"):
    """FinishJob's answer: one result per row of the item."""

    job: int
    results: list[Result]


class JobFailed(Message, tag="failed"):
    """The other answer to PrepareJob and FinishJob."""

    job: int
    failure: Failure


FromPool: TypeAlias = PoolReady | PipelineOpened | PipelineRefused | Prepared | Finished | JobFailed


# ------------------------------------------------------------------ gateway → worker


class BatchItem(Message):
    """One item of a batch: `rows` rows that stay together."""

    item: int
    deadline_s: float
    rows: int
    tensors: list[Tensor]
    """Input tensors, one per input spec of the pipeline, in order; first dimension `rows`."""
    slots: list[SlotRef]
    """Where to write each output tensor, in order; empty when outputs travel inline."""


class RunBatch(Message, tag="run"):
    """Run these items as one forward pass. Answered by one BatchDone."""

    batch: int
    model: int
    items: list[BatchItem]
    padded_rows: int
    """The allowed batch size that the rows are padded up to (where the device profits from it)."""
    aside: bool = False
    """The first batch of a version, which proves it: where the device can, it runs beside the others."""


class CancelItems(Message, tag="cancel"):
    """These items' callers have left: skip those that have not started. Each still gets its answer (`cancelled`)."""

    items: list[int]


ToWorker: TypeAlias = KeepModels | LoadModel | UnloadModel | RunBatch | CancelItems | Generate | CancelJobs


# ------------------------------------------------------------------ worker → gateway


class WorkerReady(Message, tag="ready"):
    """First message on the DEALER socket: the worker takes messages."""


class ItemAnswer(Message):
    """One item's answer: output tensors (one per output spec, in order), or a failure."""

    item: int
    tensors: list[Tensor] = []  # noqa: RUF012 - a struct copies it
    failure: Failure | None = None
    nonfinite_rows: int = 0
    """Rows of raw tensors passed on with NaN or infinity in them (typed tasks get a failure instead)."""


class BatchDone(Message, tag="done"):
    """RunBatch's answer: exactly one ItemAnswer per item."""

    batch: int
    answers: list[ItemAnswer]
    started_s: float
    """When the worker took the batch up (monotonic)."""
    copy_s: float
    """Gather from slots and move to the device."""
    run_s: float
    """Forward and head, until the outputs are back on the host."""
    rows_run: int
    """Rows really computed (padding not counted)."""
    rows_rescued: int = 0
    """Of these, rows that overflowed in FP16 and were computed again in FP32, with success."""


FromWorker: TypeAlias = (
    WorkerReady | ModelLoaded | ModelEvicted | MemoryNote | ModelNote | ModelFailed | BatchDone | Generated
)
