"""The part of the wire messages that is about the models that workers hold; see `shared.messages`."""

import msgspec


class Message(msgspec.Struct, array_like=True, omit_defaults=True):
    """What all messages have in common."""


class Failure(Message):
    """A failure as data. `code` is a `shared.errors.Code`, `text` safe for callers."""

    code: str
    text: str


# ------------------------------------------------------------------ gateway → worker


class KeepModels(Message, tag="keep"):
    """Right after WorkerReady: forget all versions but these (earlier gateways had others); LoadModels follow."""

    models: list[tuple[str, str, str]]
    """Name, version, and revision of model.yaml."""


class LoadModel(Message, tag="load"):
    """Load and warm a version (at once when it is loaded already). Answered by ModelLoaded or ModelFailed."""

    model: int
    name: str
    version: str
    config: bytes = b""
    """model.yaml, as the gateway has read it; empty: the one on the disk."""
    pinned: bool = True
    """Never given up for another version's sake."""


class UnloadModel(Message, tag="unload"):
    """Forget a version; a MemoryNote follows when its memory is back."""

    model: int


# ------------------------------------------------------------------ worker → gateway


class GenerationLimits(Message):
    """How much a version may generate at a time, and what that costs: measured in warm-up."""

    sequences: int
    """Most at a time; each beam of a beam search counts."""
    tokens: int
    """Most that their key-value cache may have to hold: sequences times the longest one's prompt and answer."""
    step_s: float
    """One token for each of `sequences` sequences."""
    prefill_s_per_token: float
    """Of a prompt."""


class ModelLoaded(Message, tag="loaded"):
    """A version is loaded and every allowed batch size is warm."""

    model: int
    batch_s: list[tuple[int, float]]
    """Measured seconds of one batch per allowed size (rows, seconds): seeds the cost model."""
    memory_bytes: int
    precision: str
    """What runs: `fp16` or `fp32`."""
    load_s: float
    """Read, build, move and warm up, together."""
    pads: bool
    """Whether a batch costs what `padded_rows` rows cost."""
    row_cap: int | None = None
    """Rows that fit the device's memory at once; None: no limit met."""
    stages_s: dict[str, float] = {}
    """`load_s` by stage: `wait` (for memory), `read` (and verify), `build`, `device`, `warm_up`."""
    estimated_bytes: int = 0
    """What was expected of `memory_bytes` before the load."""
    generation: GenerationLimits | None = None
    """Only of a version that generates text; `batch_s` is empty then."""
    buckets: list[tuple[tuple[int, ...], list[tuple[int, float]]]] = []
    """Of a version whose items differ in length: for each bucket (`Pipeline.bucket`) that was warmed, shortest first,
    what `batch_s` is for all others; `batch_s` is of the first one then."""


class ModelEvicted(Message, tag="evicted"):
    """A version was given up for another one's sake; it is loaded again when LoadModel asks for it."""

    model: int


class ModelUse(Message):
    """One loaded version in a worker's memory."""

    name: str
    version: str
    memory_bytes: int
    pinned: bool
    batches: int
    rows: int
    """Both since it was loaded."""
    per_minute: float
    """Batches lately: a moving average."""
    idle_s: float
    """Since its last batch, or its load."""


class MemoryNote(Message, tag="memory"):
    """A worker's memory after something was loaded, unloaded or given up."""

    budget_bytes: int
    models_bytes: int
    """Measured, of all that is loaded."""
    process_bytes: int
    """What the system says: resident memory on a CPU, reserved memory on a device."""
    freed_bytes: int
    """By how much the last version to go has lowered `process_bytes`."""
    expected_bytes: int
    """What that version was measured at."""
    loads: int
    evictions: int
    """Both since the worker started."""
    uses: list[ModelUse]


class ModelNote(Message, tag="note"):
    """A loaded version runs differently from now on: FP16 overflowed too often, or the device's memory ran out."""

    model: int
    precision: str
    row_cap: int | None


class ModelFailed(Message, tag="load_failed"):
    """A version can't be loaded; the model is not ready and says why."""

    model: int
    failure: Failure
