"""One served model version, as the gateway knows it."""

from gateway.batcher import BatchLimits
from gateway.state import ModelState
from shared.pipeline import Options, Pipeline
from shared.tensors import TensorSpec


class ServedModel:
    """A model version with its pipeline and present state. `number` is what all job messages call it."""

    def __init__(self, number: int, state: ModelState, pipeline: Pipeline[Options], limits: BatchLimits) -> None:
        self.number = number
        self.state = state
        self.pipeline = pipeline
        self.spec = pipeline.spec
        self.limits = limits
        self.preparing_rows = 0
        """Rows leased but not yet in the batcher: company that a waiting batch may expect."""
        self.proven_s = float("-inf")
        """When a batch of this model last came back (monotonic)."""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.state.name

    @property
    def version(self) -> str:
        """The version's content hash, 16 hexadecimal digits."""
        return self.state.version

    def input_slots(self, inline_bytes: int, rows: int) -> list[int]:
        """Bytes of the arena slots for the prepared tensors of an item; empty when they travel inline."""
        return _slots(self.spec.inputs, inline_bytes, rows)

    def output_slots(self, inline_bytes: int, rows: int) -> list[int]:
        """The same for the tensors that come back."""
        return _slots(self.spec.outputs, inline_bytes, rows)


def _slots(specs: tuple[TensorSpec, ...], inline_bytes: int, rows: int) -> list[int]:
    sizes = [spec.row_nbytes for spec in specs]
    if any(size is None for size in sizes):
        return []  # a free dimension: the size is known only afterwards, so it travels inline
    known = [size * rows for size in sizes if size is not None]
    return known if any(size > inline_bytes for size in known) else []
