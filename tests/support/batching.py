"""Short hands for tests of the batcher: one model, eight rows, four seconds of patience, nothing costs time."""

from collections.abc import Callable

from gateway.batcher import Batch, Batcher, BatchLimits, QueuedItem, QueueKey

KEY = QueueKey(0)
LIMITS = BatchLimits(max_rows=8, max_wait_s=4.0, sizes=(1, 2, 4, 8))


def free(key: QueueKey, rows: int) -> float:
    """No batch takes any time."""
    return 0.0


def nobody(model: int) -> int:
    """No rows are expected."""
    return 0


def somebody(model: int) -> int:
    """A row is expected."""
    return 1


def batcher(limits: BatchLimits = LIMITS, predict: Callable[[QueueKey, int], float] = free, **spare: float) -> Batcher:
    """Models 0 and 1, configured; no spare time unless named."""
    made = Batcher(predict, **({"caution": 1.0, "margin_s": 0.0, "lead_s": 0.0} | spare))
    made.configure(0, limits)
    made.configure(1, limits)
    return made


def item(
    number: int,
    rows: int = 1,
    deadline_s: float = 100.0,
    queued_s: float = 0.0,
    key: QueueKey = KEY,
    alone: bool = False,
) -> QueuedItem:
    """One that waits since 0 and could wait for long."""
    return QueuedItem(number, key, rows, deadline_s, queued_s, alone=alone)


def numbers(batch: Batch | None) -> list[int]:
    """Who is in the batch; nobody without one."""
    return [] if batch is None else [found.item for found in batch.items]


def waiting_for_company(queue: Batcher, now_s: float) -> list[int]:
    """The batch that goes although the idle worker may expect more."""
    return numbers(queue.next_batch(now_s, worker_idle=True, expected_rows=somebody))
