"""One prepared item on its way through batcher and worker, and what comes back for it."""

import asyncio
from typing import NamedTuple

from gateway.batcher import Batch, QueuedItem
from gateway.drops import Drops, Point
from gateway.leases import Lease
from gateway.request import PROOF_PRIORITY
from gateway.served import ServedModel
from gateway.worker_client import Worker
from shared.clock import now_s
from shared.errors import Code, DeadlineExceeded, HeadraceError, LostTwice, NotReady, TooLarge, rebuild
from shared.messages import BatchDone, BatchItem, ItemAnswer
from shared.tensors import Tensor

_SKIPPED = (Code.CANCELLED.value, Code.DEADLINE_EXCEEDED.value)
"""A worker's word for what it did not compute."""


class Outcome(NamedTuple):
    """What a worker answered for one item, and where its time went."""

    tensors: list[Tensor]
    batch_s: float
    """From submission until the worker took the batch up."""
    copy_s: float
    run_s: float
    batch_rows: int
    nonfinite_rows: int
    """Rows with NaN or infinity, passed on since they are raw tensors."""


class Work:
    """One item between `submit` and its answer."""

    __slots__ = ("deaths", "future", "lease", "left", "model", "queued", "settled", "tensors")

    def __init__(
        self,
        model: ServedModel,
        queued: QueuedItem,
        tensors: list[Tensor],
        lease: Lease,
        future: "asyncio.Future[Outcome]",
    ) -> None:
        self.model = model
        self.queued = queued
        self.tensors = tensors
        self.lease = lease
        self.future = future
        self.deaths = 0
        self.left: Code | None = None
        """Why its request left while a worker had it, whose answer tells whether it was dropped or computed."""
        self.settled = False
        """Whether it stands in the books already: as answered, dropped or computed for nobody."""

    def drop(self, drops: Drops, point: Point, reason: Code | None = None) -> None:
        """Count that nobody computes it any more, once; by default for the reason why its request left."""
        if not self.settled:
            self.settled = True
            terms = self.lease.terms
            drops.add(self.model.name, point, reason or self.left or terms.why_left(now_s()), terms.priority)

    def expire(self, drops: Drops) -> None:
        """Answer it, since its deadline can't be met any more; nothing when its request has left meanwhile."""
        if not self.future.done():
            self.drop(drops, Point.BATCH, Code.DEADLINE_EXCEEDED)
            fail(self, DeadlineExceeded("the deadline could not be met: what waits ahead and the model need longer"))


def batch_item(work: Work) -> BatchItem:
    """The item as the worker gets it."""
    return BatchItem(
        work.queued.item,
        work.queued.deadline_s,
        work.queued.rows,
        work.tensors,
        [slot.ref for slot in work.lease.outputs],
    )


def proves(works: list[Work]) -> bool:
    """Whether it is the first batch of a version, with nothing in it but the proof: it may run beside the others."""
    return all(work.lease.terms.priority == PROOF_PRIORITY and work.model.proven_s == float("-inf") for work in works)


def cost_rows(batch: Batch, worker: Worker) -> int:
    """Rows that the worker's device computes for this batch."""
    return batch.padded_rows if batch.key.model in worker.pads else batch.rows


def fail(work: Work, error: HeadraceError) -> None:
    """Answer with a failure, unless the request has gone."""
    if not work.future.done():
        work.future.set_exception(error)


def settle(work: Work, answer: ItemAnswer, done: BatchDone, batch_rows: int, drops: Drops) -> int:
    """A worker's answer for one item; returns its rows when they were computed and nobody waits for them any more."""
    failure = answer.failure
    if failure is not None:
        if failure.code in _SKIPPED:
            work.drop(drops, Point.COPY, work.left or Code(failure.code))
        fail(work, rebuild(failure.code, failure.text))
    elif not work.future.done():
        work.lease.terms.computed_rows += work.queued.rows
        work.future.set_result(outcome_of(work, answer, done, batch_rows))
    elif not work.settled:
        work.settled = True
        return work.queued.rows
    work.settled = True
    return 0


def set_apart(works: list[Work]) -> list[Work]:
    """Items whose inline tensors are together over what one message can carry: each is to travel alone from now on.

    One that is too large by itself is answered, and not returned.
    """
    if len(works) == 1:
        fail(works[0], TooLarge("the input is larger than one message between the server's processes can be"))
        return []
    for work in works:
        work.queued.alone = True
    return works


def was_given_up(work: Work, answer: ItemAnswer) -> bool:
    """Whether the worker had given the version up for another one while the batch was on its way: nothing has run."""
    return (
        answer.failure is not None
        and answer.failure.code == Code.NOT_READY
        and not work.model.pinned
        and not work.future.done()
    )


def may_try_again(work: Work, drops: Drops, *, suspect: bool) -> bool:
    """After the death of its worker: once more, alone if it may have been the cause; the second time it is answered."""
    if work.future.done():
        work.drop(drops, Point.COPY)
        return False
    if suspect:  # what was only staged behind the running batch can't have ended the worker
        work.deaths += 1
        if work.deaths > 1:
            fail(work, LostTwice("the worker was lost twice while it ran this input"))
            return False
        work.queued.alone = True  # a suspect takes nobody with it
    return True


def outcome_of(work: Work, answer: ItemAnswer, done: BatchDone, batch_rows: int) -> Outcome:
    """A worker's answer for one item."""
    waited_s = max(0.0, done.started_s - work.queued.queued_s)
    return Outcome(answer.tensors, waited_s, done.copy_s, done.run_s, batch_rows, answer.nonfinite_rows)


def unloaded(model: ServedModel) -> NotReady:
    """The answer to what waits for a model that was taken out of service."""
    return NotReady(f"model {model.name!r} was unloaded")
