"""Runs one batch: every item gets exactly one answer, and a bad one never spoils the others'.

    views of the rows → still wanted? → run → finite? → outputs into slots or inline

On a device that works beside the host, `start` queues the batch and `finish` waits for it, so that another batch's rows
are copied meanwhile. On any other one all work is done in `finish`.

What can go wrong with a group of items, and what is done about it:
- the caller has left, or the deadline has passed: answered so, before anything is copied;
- the network raises: the group is halved, and halved again, until the culprit stands alone;
- the device has no memory: the same, and the size is remembered;
- a row is not finite in FP16: its item runs again in FP32;
- the device itself is lost: DeviceLost ends the process, and with it all answers.
"""

import contextlib
from collections import deque
from collections.abc import Sequence

import msgspec

from shared.arena import AttachedArena
from shared.clock import Clock
from shared.errors import Code, InternalFault
from shared.logs import get_logger
from shared.messages import BatchDone, BatchItem, Failure, ItemAnswer, RunBatch
from shared.tensors import Array
from workers.backends.base import DeviceLost, Forward, Mask, OutOfMemory, Pass, Precision
from workers.items import Item, read, rows_of, written
from workers.loaded import LoadedVersion

_log = get_logger()


class _Attempt(msgspec.Struct):
    """A group of items on its way through the device."""

    items: list[Item]
    precision: Precision
    crowded: bool
    """Another batch was under way, so that running out of memory says nothing about this one's size."""
    under_way: Pass | None = None
    error: Exception | None = None
    """Why it is not under way."""


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
    batch = BatchRun(message, loaded, arena, clock, cancelled)
    batch.start()
    return batch.finish()


class BatchRun:
    """One batch under way; the answers found so far."""

    def __init__(
        self, message: RunBatch, loaded: LoadedVersion, arena: AttachedArena, clock: Clock, cancelled: set[int]
    ) -> None:
        self.message = message
        self.loaded = loaded
        self.lane = 0
        self._arena = arena
        self._clock = clock
        self._cancelled = cancelled
        self._others: Sequence[BatchRun] = ()
        self._answers: dict[int, ItemAnswer] = {}
        self._groups: deque[list[Item]] = deque()
        self._first: _Attempt | None = None
        self._done = BatchDone(message.batch, [], clock(), 0.0, 0.0, 0)

    def start(self, others: "Sequence[BatchRun]" = (), lane: int = 0) -> None:
        """Read the items and start their pass. `others`: the batches under way, kept up to date; `lane` must be free.

        Raises DeviceLost.
        """
        self._others, self.lane = others, lane
        items = [item for item in map(self._readable, self.message.items) if item is not None]
        self._groups.extend(self._that_fit(items))
        self._first = self._begin(self._groups.popleft(), self.loaded.precision)

    def done(self) -> bool:
        """Whether `finish` need not wait for the device first."""
        under_way = self._under_way()
        return under_way is None or under_way.done()

    def finish(self) -> BatchDone:
        """Wait for its pass, run what is left to run, and give the answers. Raises DeviceLost."""
        if self._first is not None:
            first, self._first = self._first, None
            self._complete(first)
        for group in self._groups:
            self._attempt(group, self.loaded.precision)
        done = self._done
        done.answers = [self._answers.get(item.item) or _internal(item.item) for item in self.message.items]
        # What it waited for the batch before it is no part of its own time.
        done.started_s = max(done.started_s, self._clock() - done.copy_s - done.run_s)
        return done

    def settle(self) -> None:
        """Wait until the device does nothing for this batch; `finish` is still to follow. Raises DeviceLost."""
        under_way = self._under_way()
        if under_way is not None and not under_way.done():
            with contextlib.suppress(OutOfMemory):
                under_way.wait()

    def _under_way(self) -> Pass | None:
        return None if self._first is None else self._first.under_way

    def _readable(self, item: BatchItem) -> Item | None:
        try:
            return read(item, self.loaded.spec.inputs, self._arena)
        except (ValueError, KeyError, IndexError) as error:  # the gateway checked this: a bug of ours, of one item only
            _log.error("an item can't be read", item=item.item, model=self.loaded.key.name, reason=str(error)[:300])
            self._fail(item, Code.INTERNAL, InternalFault.TEXT)
            return None

    def _still_wanted(self, items: list[Item]) -> list[Item]:
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

    def _that_fit(self, items: list[Item]) -> list[list[Item]]:
        """Groups within the rows that the device's memory is known to hold; as a rule one."""
        cap = self.loaded.row_cap
        if cap is None:
            return [items]
        groups: list[list[Item]] = [[]]
        for item in items:
            if groups[-1] and rows_of(groups[-1]) + item.message.rows > cap:
                groups.append([])
            groups[-1].append(item)
        return groups

    def _attempt(self, items: list[Item], precision: Precision) -> None:
        """Run a group and answer each of its items. Halves it on failure: at most log2(n) + 1 levels deep."""
        self._complete(self._begin(items, precision))

    def _begin(self, items: list[Item], precision: Precision) -> _Attempt:
        """Start the pass of those items of a group that are still wanted. What that raises comes up in `_complete`."""
        attempt = _Attempt(self._still_wanted(items), precision, any(not other.done() for other in self._others))
        if attempt.items:
            try:
                attempt.under_way = self._start(attempt.items, precision)
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001 - as in `_complete`
                attempt.error = error
        return attempt

    def _complete(self, attempt: _Attempt) -> None:
        items, precision = attempt.items, attempt.precision
        if not items:
            return
        try:
            forward = self._result(attempt)
        except DeviceLost:
            raise
        except OutOfMemory:
            if attempt.crowded:
                self._alone(items, precision)
                return
            self.loaded.lower_row_cap(rows_of(items))
            self._halve(items, precision, Code.OVERLOADED, "the device has no memory left for this input")
        except Exception as error:  # noqa: BLE001 - networks are users' code and may raise anything, on any input
            self._log_failure(items, error)
            self._halve(items, precision, Code.INTERNAL, InternalFault.TEXT)
        else:
            self._answer(items, forward, precision)

    def _result(self, attempt: _Attempt) -> Forward:
        if attempt.under_way is None:
            raise attempt.error or RuntimeError("nothing was started")
        forward = attempt.under_way.wait()
        self._done.copy_s += forward.copy_s
        self._done.run_s += forward.run_s
        self._done.rows_run += rows_of(attempt.items)
        return forward

    def _alone(self, items: list[Item], precision: Precision) -> None:
        """Once more, after the device has finished everything else."""
        for other in self._others:
            other.settle()
        self._attempt(items, precision)

    def _log_failure(self, items: list[Item], error: Exception) -> None:
        """One trace and one line on halving per model every few seconds, however many rows its network raises on."""
        model = self.loaded
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

    def _start(self, items: list[Item], precision: Precision) -> Pass:
        rows = rows_of(items)
        whole = len(items) == len(self.message.items)
        padded = self.message.padded_rows if whole else self.loaded.padded(rows)
        return self.loaded.runner.start([item.arrays for item in items], max(rows, padded), precision, self.lane)

    def _halve(self, items: list[Item], precision: Precision, code: Code, text: str) -> None:
        if len(items) == 1:
            self._fail(items[0].message, code, text)
            return
        middle = len(items) // 2
        self._attempt(items[:middle], precision)
        self._attempt(items[middle:], precision)

    def _answer(self, items: list[Item], forward: Forward, precision: Precision) -> None:
        rescue: list[Item] = []
        first = 0
        for item in items:
            last = first + item.message.rows
            if bool(forward.finite[first:last].all()):
                self._succeed(item.message, [output[first:last] for output in forward.outputs])
            elif precision == "fp16":
                rescue.append(item)
            elif self.loaded.raw:
                self._succeed(item.message, [output[first:last] for output in forward.outputs])
                self._answers[item.message.item].nonfinite_rows = int((~forward.finite[first:last]).sum())
            else:
                self._fail(item.message, Code.NONFINITE_OUTPUT, _nonfinite(forward.finite[first:last]))
            first = last
        if precision == "fp16":
            self._rescue(rescue, rows_of(items))

    def _rescue(self, items: list[Item], of_rows: int) -> None:
        """What overflowed in FP16 runs again in FP32."""
        if items:
            self._attempt(items, "fp32")
        fine = [item for item in items if self._answers[item.message.item].failure is None]
        self._done.rows_rescued += rows_of(fine)
        self.loaded.guard.record(of_rows, rows_of(fine))

    def _succeed(self, item: BatchItem, outputs: list[Array]) -> None:
        try:
            tensors = written(item, self.loaded.spec.outputs, outputs, self._arena)
        except ValueError as error:  # a slot too small: a bug of ours, of one item only
            _log.error(
                "an output does not fit its slot", item=item.item, model=self.loaded.key.name, reason=str(error)[:300]
            )
            self._fail(item, Code.INTERNAL, InternalFault.TEXT)
        else:
            self._answers[item.item] = ItemAnswer(item.item, tensors)

    def _fail(self, item: BatchItem, code: Code, text: str) -> None:
        self._answers[item.item] = ItemAnswer(item.item, failure=Failure(code, text))


def _nonfinite(finite: Mask) -> str:
    return f"the model's output is not finite for this input ({int((~finite).sum())} of {len(finite)} row(s))"


def _internal(item: int) -> ItemAnswer:
    return ItemAnswer(item, failure=Failure(Code.INTERNAL, InternalFault.TEXT))
