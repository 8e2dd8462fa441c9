"""Runs one batch: every item gets exactly one answer, and a bad one never spoils the others'.

    still wanted? → views of the rows → run → finite? → outputs into slots or inline

What can go wrong with a group of items, and what is done about it:
- the caller has left, or the deadline has passed: answered so, before anything is copied;
- the network raises: the group is halved, and halved again, until the culprit stands alone;
- the device has no memory: the same, and the size is remembered;
- a row is not finite in FP16: its item runs again in FP32;
- the device itself is lost: DeviceLost ends the process, and with it all answers.
"""

import msgspec

from shared.arena import AttachedArena
from shared.clock import Clock
from shared.errors import Code, InternalFault
from shared.logs import get_logger
from shared.messages import BatchDone, BatchItem, Failure, ItemAnswer, RunBatch
from shared.tensors import DTYPES, Array, SlotRef, Tensor, TensorSpec, as_array, wire_bytes
from workers.backends.base import DeviceLost, Forward, Mask, OutOfMemory, Precision
from workers.model_pool import LoadedVersion

_log = get_logger()


class _Item(msgspec.Struct):
    """An item whose input rows can be read."""

    message: BatchItem
    arrays: list[Array]


def refuse_all(message: RunBatch, code: Code, text: str, at_s: float) -> BatchDone:
    """The answer to a batch that is not run at all."""
    answers = [ItemAnswer(item.item, failure=Failure(code, text)) for item in message.items]
    return BatchDone(message.batch, answers, at_s, 0.0, 0.0, 0)


def run_batch(
    message: RunBatch, loaded: LoadedVersion, arena: AttachedArena, clock: Clock, cancelled: set[int]
) -> BatchDone:
    """Run a batch on a loaded version. `cancelled` holds the numbers of items whose callers have left.

    Raises DeviceLost.
    """
    return _Batch(message, loaded, arena, clock, cancelled).run()


class _Batch:
    """One batch under way; the answers found so far."""

    def __init__(
        self, message: RunBatch, loaded: LoadedVersion, arena: AttachedArena, clock: Clock, cancelled: set[int]
    ) -> None:
        self._message = message
        self._loaded = loaded
        self._arena = arena
        self._clock = clock
        self._cancelled = cancelled
        self._answers: dict[int, ItemAnswer] = {}
        self._done = BatchDone(message.batch, [], clock(), 0.0, 0.0, 0)

    def run(self) -> BatchDone:
        items = [item for item in map(self._readable, self._message.items) if item is not None]
        for group in self._that_fit(items):
            self._attempt(group, self._loaded.precision)
        self._done.answers = [self._answers.get(item.item) or _internal(item.item) for item in self._message.items]
        return self._done

    def _readable(self, item: BatchItem) -> _Item | None:
        try:
            return _Item(item, [self._view(item, number) for number in range(len(self._loaded.spec.inputs))])
        except (ValueError, KeyError, IndexError) as error:  # the gateway checked this: a bug of ours, of one item only
            _log.error("an item can't be read", item=item.item, model=self._loaded.key.name, reason=str(error)[:300])
            self._fail(item, Code.INTERNAL, InternalFault.TEXT)
            return None

    def _view(self, item: BatchItem, number: int) -> Array:
        tensor, spec = item.tensors[number], self._loaded.spec.inputs[number]
        _check(tensor, spec, item.rows)
        if isinstance(tensor.data, SlotRef) and tensor.datatype != "BYTES":
            return self._arena.array(tensor.data, tensor.datatype, tensor.shape)
        return as_array(tensor, self._arena.memory)

    def _still_wanted(self, items: list[_Item]) -> list[_Item]:
        """The last check before the device: work for nobody is dropped here."""
        now_s = self._clock()
        wanted = []
        for item in items:
            if item.message.item in self._cancelled:
                self._fail(item.message, Code.CANCELLED, "the caller has left")
            elif item.message.deadline_s <= now_s:
                self._fail(item.message, Code.DEADLINE_EXCEEDED, "the deadline passed before the model ran")
            else:
                wanted.append(item)
        return wanted

    def _that_fit(self, items: list[_Item]) -> list[list[_Item]]:
        """Groups within the rows that the device's memory is known to hold; as a rule one."""
        cap = self._loaded.row_cap
        if cap is None:
            return [items]
        groups: list[list[_Item]] = [[]]
        for item in items:
            if groups[-1] and _rows(groups[-1]) + item.message.rows > cap:
                groups.append([])
            groups[-1].append(item)
        return groups

    def _attempt(self, items: list[_Item], precision: Precision) -> None:
        """Run a group and answer each of its items. Halves it on failure: at most log2(n) + 1 levels deep."""
        items = self._still_wanted(items)
        if not items:
            return
        try:
            forward = self._forward(items, precision)
        except DeviceLost:
            raise
        except OutOfMemory:
            self._loaded.lower_row_cap(_rows(items))
            self._halve(items, precision, Code.OVERLOADED, "the device has no memory left for this input")
        except Exception as error:  # noqa: BLE001 - networks are users' code and may raise anything, on any input
            self._log_failure(items, error)
            self._halve(items, precision, Code.INTERNAL, InternalFault.TEXT)
        else:
            self._answer(items, forward, precision)

    def _log_failure(self, items: list[_Item], error: Exception) -> None:
        """One trace and one line on halving per model every few seconds, however many rows its network raises on."""
        model = self._loaded
        seldom = model.failed_items if len(items) == 1 else model.failed_batches
        left_out = seldom.due(self._clock())
        if left_out is None:
            return
        if len(items) == 1:
            number = items[0].message.item
            _log.error("an item failed", item=number, model=model.key.name, left_out=left_out, exc_info=error)
        else:
            what = f"{type(error).__name__}: {str(error)[:300]}"
            _log.warning(
                "a batch failed and is halved", items=len(items), model=model.key.name, left_out=left_out, error=what
            )

    def _forward(self, items: list[_Item], precision: Precision) -> Forward:
        rows = _rows(items)
        whole = len(items) == len(self._message.items)
        padded = self._message.padded_rows if whole else self._loaded.padded(rows)
        forward = self._loaded.runner.run([item.arrays for item in items], max(rows, padded), precision)
        self._done.copy_s += forward.copy_s
        self._done.run_s += forward.run_s
        self._done.rows_run += rows
        return forward

    def _halve(self, items: list[_Item], precision: Precision, code: Code, text: str) -> None:
        if len(items) == 1:
            self._fail(items[0].message, code, text)
            return
        middle = len(items) // 2
        self._attempt(items[:middle], precision)
        self._attempt(items[middle:], precision)

    def _answer(self, items: list[_Item], forward: Forward, precision: Precision) -> None:
        rescue: list[_Item] = []
        first = 0
        for item in items:
            last = first + item.message.rows
            if bool(forward.finite[first:last].all()):
                self._succeed(item.message, [output[first:last] for output in forward.outputs])
            elif precision == "fp16":
                rescue.append(item)
            elif self._loaded.raw:
                self._succeed(item.message, [output[first:last] for output in forward.outputs])
                self._answers[item.message.item].nonfinite_rows = int((~forward.finite[first:last]).sum())
            else:
                self._fail(item.message, Code.NONFINITE_OUTPUT, _nonfinite(forward.finite[first:last]))
            first = last
        if precision == "fp16":
            self._rescue(rescue, _rows(items))

    def _rescue(self, items: list[_Item], of_rows: int) -> None:
        """What overflowed in FP16 runs again in FP32."""
        if items:
            self._attempt(items, "fp32")
        fine = [item for item in items if self._answers[item.message.item].failure is None]
        self._done.rows_rescued += _rows(fine)
        self._loaded.guard.record(of_rows, _rows(fine))

    def _succeed(self, item: BatchItem, outputs: list[Array]) -> None:
        try:
            tensors = [self._tensor(item, number, output) for number, output in enumerate(outputs)]
        except ValueError as error:  # a slot too small: a bug of ours, of one item only
            _log.error(
                "an output does not fit its slot", item=item.item, model=self._loaded.key.name, reason=str(error)[:300]
            )
            self._fail(item, Code.INTERNAL, InternalFault.TEXT)
        else:
            self._answers[item.item] = ItemAnswer(item.item, tensors)

    def _tensor(self, item: BatchItem, number: int, output: Array) -> Tensor:
        """The rows of one output where the gateway wants them: copied, since the next pass overwrites them."""
        spec, shape = self._loaded.spec.outputs[number], output.shape
        if output.dtype != DTYPES[spec.datatype]:
            raise ValueError(f"output {spec.name} is {output.dtype}, declared {spec.datatype}")
        if not item.slots:
            return Tensor(spec.name, spec.datatype, shape, wire_bytes(output))
        slot = item.slots[number] if number < len(item.slots) else SlotRef(0, 0)
        self._arena.array(slot, spec.datatype, shape)[...] = output
        return Tensor(spec.name, spec.datatype, shape, slot)

    def _fail(self, item: BatchItem, code: Code, text: str) -> None:
        self._answers[item.item] = ItemAnswer(item.item, failure=Failure(code, text))


def _rows(items: list[_Item]) -> int:
    return sum(item.message.rows for item in items)


def _check(tensor: Tensor, spec: TensorSpec, rows: int) -> None:
    """Raises ValueError when a tensor is not what the pipeline declares."""
    shape = tensor.shape
    fits = len(shape) == 1 + len(spec.shape) and shape[0] == rows >= 1
    if not fits or any(want not in (-1, have) for want, have in zip(spec.shape, shape[1:], strict=True)):
        raise ValueError(f"input {spec.name} has shape {list(shape)} for {rows} rows, declared {list(spec.shape)}")
    if tensor.datatype != spec.datatype:
        raise ValueError(f"input {spec.name} is {tensor.datatype}, declared {spec.datatype}")


def _nonfinite(finite: Mask) -> str:
    return f"the model's output is not finite for this input ({int((~finite).sum())} of {len(finite)} row(s))"


def _internal(item: int) -> ItemAnswer:
    return ItemAnswer(item, failure=Failure(Code.INTERNAL, InternalFault.TEXT))
