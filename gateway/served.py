"""One served model version, as the gateway knows it."""

from collections.abc import Callable, Sized
from typing import NamedTuple

from gateway.batcher import BatchLimits
from gateway.book import Book
from gateway.cache import Digests
from gateway.request import GENERATION, Write
from gateway.state import ModelState
from shared.errors import Code
from shared.model_config import revision_of
from shared.pipeline import Options, Pipeline, RawInput
from shared.tensors import TensorSpec

_BUILT_IN = "shared.pipelines."


def task_of(pipeline: Pipeline[Options]) -> str:
    """The built-in pipeline that this is, or that a user's own builds on, by name; empty: none."""
    if pipeline.generates:  # however it is built
        return GENERATION
    modules = (each.__module__ for each in type(pipeline).__mro__)
    return next((name.removeprefix(_BUILT_IN) for name in modules if name.startswith(_BUILT_IN)), "")


class SlotSizes(NamedTuple):
    """Bytes of the arena slots of one item; empty lists where everything is small enough to travel inline."""

    payload: list[int]
    """Of the encoded input: at most one."""
    inputs: list[int]
    """Of the prepared tensors, one per input spec."""
    outputs: list[int]
    """Of the tensors that come back, one per output spec."""


class Terms:
    """What a request asks of every queue that its items wait in, and what became of the request; one for all items."""

    __slots__ = (
        "chosen",
        "coming_items",
        "coming_rows",
        "computed_rows",
        "deadline_s",
        "digests",
        "ended",
        "late_s",
        "priority",
        "reuse",
        "write",
    )

    def __init__(
        self,
        deadline_s: float,
        priority: int,
        late_s: float = float("inf"),
        digests: Digests | None = None,
        *,
        reuse: bool = True,
        chosen: bool = False,
    ) -> None:
        self.deadline_s = deadline_s
        """Absolute, monotonic."""
        self.priority = priority
        """Smaller goes first."""
        self.late_s = late_s
        """From when on leaving means: too late (`Request.late_s`)."""
        self.reuse = reuse
        """False: every stage does its own work, whatever was kept from before."""
        self.chosen = chosen
        """Whether the caller chose the version: it is none of the traffic that is divided."""
        self.digests = digests or Digests()
        """Of the request's inputs, as far as anybody has asked."""
        self.ended: Code | None = None
        """Why the request as a whole failed, while some of its items were still under way."""
        self.computed_rows = 0
        """Rows that a worker has computed and answered while the request waited for them."""
        self.coming_items = self.coming_rows = 0
        """In the model's figures already for items that have not begun yet (`gateway.underway`)."""
        self.write: Write | None = None
        """Takes a text while it grows (`Request.write`)."""

    def why_left(self, at_s: float) -> Code:
        """Why an item was cancelled at this time: for the reason of its request, its time was over, or by choice."""
        return self.ended or (Code.DEADLINE_EXCEEDED if at_s >= self.late_s else Code.CANCELLED)


class ServedModel:
    """A model version with its pipeline and present state. `number` is what all job messages call it."""

    def __init__(self, number: int, state: ModelState, pipeline: Pipeline[Options], limits: BatchLimits) -> None:
        self.number = number
        self.state = state
        self.pipeline = pipeline
        self.task = task_of(pipeline)
        """See `task_of`."""
        self.requests = 0
        """Sent to this version and not answered yet."""
        self.config = b""
        """model.yaml as it was read for this version: pool and workers are to have no other."""
        self.preprocessing = b""
        """What decides how an input is prepared (`gateway.prepared_cache.preprocessing_digest`)."""
        self.cached = True
        """Whether its answers may be kept: `cache` of model.yaml."""
        self.spec = pipeline.spec
        self.limits = limits
        self.has_buckets = any(size < 0 for spec in self.spec.inputs for size in spec.shape)
        """Whether items differ in shape, so that not all may share a batch."""
        self.rows_in_flight = 0
        """Admitted and not yet answered by a worker."""
        self.book = Book()
        """These, in the order in which they are served."""
        self.unprepared_items = 0
        """Admitted and not yet through a pool process."""
        self.prepare_s = 0.0
        """Seconds that a pool process needs for one item: a moving average."""
        self.batch_s: Callable[[int], float] = lambda _rows: 0.0
        """Seconds of a batch of so many rows; set to the cost model by the composition."""
        self.workers = 1
        """Workers that have it loaded; 1 before the first one has, so that it can be planned for."""
        self.preparing_rows = 0
        """Rows leased but not yet in the batcher: company that a waiting batch may expect."""
        self.proven_s = float("-inf")
        """When a batch of this model last came back (monotonic)."""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.state.name

    @property
    def revision(self) -> str:
        """Which content of model.yaml it runs with."""
        return revision_of(self.config)

    @property
    def pinned(self) -> bool:
        """Whether a worker keeps it whatever else is to be loaded."""
        return not self.state.on_demand

    @property
    def waits_for_load(self) -> bool:
        """Whether requests wait while it is loaded, since it is loaded for them."""
        return not self.pinned and self.state.phase in {"on_demand", "loading", "proving"}

    @property
    def max_rows(self) -> int:
        """Rows of a full batch."""
        return self.limits.max_rows

    @property
    def goes_on(self) -> bool:
        """Whether its rows take the worker again and again, for a short time each: texts, step by step."""
        return self.pipeline.generates

    @property
    def weight(self) -> float:
        """Its share of worker time, in relation to other models."""
        return self.limits.weight

    def enter(self, terms: Terms, rows: int) -> None:
        """Rows were admitted."""
        self.rows_in_flight += rows
        if rows:
            self.book.add(terms.priority, terms.deadline_s, rows)

    def leave(self, terms: Terms, rows: int) -> None:
        """As many of these were answered by a worker, or dropped."""
        self.rows_in_flight -= rows
        if rows:
            self.book.remove(terms.priority, terms.deadline_s, rows)

    def prepared_in(self, seconds: float) -> None:
        """A pool process has prepared one item."""
        self.prepare_s += (seconds - self.prepare_s) * (0.1 if self.prepare_s else 1.0)

    @property
    def version(self) -> str:
        """The version's content hash, 16 hexadecimal digits."""
        return self.state.version

    def slots_for(self, raw: RawInput, inline_bytes: int) -> SlotSizes:
        """What an item needs in the arena; what is small enough travels inside the messages."""
        if self.pipeline.passthrough:
            return SlotSizes(
                [],
                _if_large([len(tensor.data) for tensor in raw.tensors], inline_bytes),
                self._outputs(raw, inline_bytes),
            )
        payload = [raw.nbytes] if raw.nbytes > inline_bytes else []
        return SlotSizes(payload, _of_specs(self.spec.inputs, 1, inline_bytes), self._outputs(raw, inline_bytes))

    def _outputs(self, raw: RawInput, inline_bytes: int) -> list[int]:
        return _of_specs(self.spec.outputs, raw.rows, inline_bytes)


def _of_specs(specs: tuple[TensorSpec, ...], rows: int, inline_bytes: int) -> list[int]:
    sizes = [spec.row_nbytes for spec in specs]
    known = [size * rows for size in sizes if size is not None]
    # with a free dimension the size is known only afterwards, so it travels inline
    return _if_large(known, inline_bytes) if len(known) == len(sizes) else []


def _if_large(sizes: list[int], inline_bytes: int) -> list[int]:
    return sizes if any(size > inline_bytes for size in sizes) else []


class Models(dict[int, ServedModel]):
    """By number. One that was withdrawn stays until the last of its batches is back: what is known of it judges them.

    Used on the event loop only.
    """

    def __init__(self, running: Callable[[], set[int]], forget: Callable[[int], None]) -> None:
        """`running()`: the models of which batches are out. `forget(number)` drops what was learned about one."""
        self._running = running
        self._forget = forget
        self._withdrawn: set[int] = set()

    def add(self, model: ServedModel) -> None:
        """A model is served, perhaps again."""
        self[model.number] = model
        self._withdrawn.discard(model.number)

    def count_workers(self, with_model: Callable[[int], Sized]) -> None:
        """Who has loaded what has changed."""
        for model in self.values():
            model.workers = max(1, len(with_model(model.number)))

    def withdraw(self, number: int) -> None:
        """It is served no more."""
        self._withdrawn.add(number)
        self.tidy()

    def tidy(self) -> None:
        """Forget the withdrawn models that have no batch out any more. Called a few times a second."""
        for number in self._withdrawn - self._running() if self._withdrawn else ():
            self._withdrawn.discard(number)
            self.pop(number, None)
            self._forget(number)
