"""Drives the batcher: items in, batches to the workers, answers back to the waiting requests.

All decisions are the batcher's (pure policy); this file owns the timers, the futures and the consequences of a
worker's death. Of several workers that have a model, its next batch goes to the one that should be done first. A batch
is staged behind a running one only when it is full or the running one is about to end: staged, it can't grow any more.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from gateway.batcher import Batch, Batcher, QueuedItem, QueueKey
from gateway.cost_model import CostModel
from gateway.drops import Drops, Point
from gateway.hangs import Hangs
from gateway.inflight import InFlight
from gateway.leases import Lease
from gateway.parked import Parked
from gateway.pauses import Pauses
from gateway.running import Running, RunningBatches
from gateway.served import Models, ServedModel
from gateway.work import (
    Outcome,
    Work,
    batch_item,
    cost_rows,
    fail,
    may_try_again,
    proves,
    set_apart,
    settle,
    unloaded,
    was_given_up,
)
from gateway.worker_choice import WorkerChoice
from gateway.worker_client import Worker, WorkerClient, WorkerEvents
from shared.clock import now_s
from shared.errors import HeadraceError, NotReady
from shared.messages import BatchDone, CancelItems, ItemAnswer, ModelLoaded, RunBatch
from shared.settings import WorkerSettings
from shared.tensors import Tensor
from shared.transport import FrameTooBig


class Dispatcher(WorkerEvents):
    """Batches in front of the workers; lives on the event loop."""

    def __init__(
        self, batcher: Batcher, cost: CostModel, workers: WorkerClient, inflight: InFlight[Work], limits: WorkerSettings
    ) -> None:
        self._batcher = batcher
        self._cost = cost
        self._workers = workers
        self._inflight = inflight
        self._limits = limits
        self._waiting: dict[int, Work] = {}  # in the batcher
        self.parked = Parked(limits.return_limit_ms / 1000)
        self.running = RunningBatches()
        self._models = Models(self.running.models, cost.forget)
        self._hangs = Hangs(workers, self.running, cost, limits.hang_limit_ms / 1000)
        self._choice = WorkerChoice(workers, self.running, limits.staged_batches)
        self._next_item = 1
        self._next_batch = 1
        self._timer: asyncio.TimerHandle | None = None
        self._kicked = False
        self.slots_back: Callable[[], None] = lambda: None
        """Called after slots of a request that had left came out of quarantine, or when more may be held."""
        self.on_batch: Callable[[ServedModel, Batch, BatchDone, int], None] = lambda *_: None
        """Told of every finished batch: model, batch, answer, rows computed for nobody."""
        self.on_lost: Callable[[list[Running]], None] = lambda _: None
        """Told of the batches that a worker ran when it was lost: it died, or hung and was ended."""
        self.lost_workers = 0
        self.drops = Drops()
        """What is dropped here; the composition puts the one of the metrics here."""

    def configure(self, model: ServedModel) -> None:
        """Accept items of this model."""
        self._models.add(model)
        model.batch_s = self.running.with_others(partial(self._cost.predict, QueueKey(model.number, ())))
        self._batcher.configure(model.number, model.limits)

    def submit(
        self, model: ServedModel, tensors: list[Tensor], lease: Lease, deadline_s: float
    ) -> "asyncio.Future[Outcome]":
        """Queue a prepared item; the future gets its outcome or a HeadraceError. Cancelling it drops the item."""
        number = self._next_item
        self._next_item += 1
        bucket = model.pipeline.bucket([tensor.shape for tensor in tensors]) if model.has_buckets else ()
        key = QueueKey(model.number, bucket)
        chosen = lease.terms.chosen
        queued = QueuedItem(number, key, lease.rows, deadline_s, now_s(), priority=lease.priority, chosen=chosen)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        work = Work(model, queued, tensors, lease, future)
        future.add_done_callback(lambda done: self._left(work) if done.cancelled() else None)
        self._enqueue(work)
        self._kick_soon()
        return future

    def waiting_rows(self, model: int) -> int:
        """Rows of a model that no worker has yet."""
        return self.parked.rows(model) + self._batcher.waiting_rows(model)

    def waiting_items(self) -> int:
        """Items that no worker has yet."""
        return len(self._waiting) + len(self.parked)

    def outstanding(self, worker: Worker) -> int:
        """Batches that the worker holds."""
        return self.running.count(worker)

    def kick(self) -> None:
        """Send what may go now, and come back when the batcher says that time alone changes the answer."""
        self._kicked = False
        now = now_s()
        for item in self._batcher.expired(now):
            self._waiting.pop(item.item).expire(self.drops)
        while self._send_next(now):
            pass
        self._arm(now)

    def _kick_soon(self) -> None:
        """On the loop's next turn: what else this one brings shares the batch, and a batch's fixed cost."""
        if not self._kicked:
            self._kicked = True
            asyncio.get_running_loop().call_soon(self.kick)

    # ------------------------------------------------------------ events

    def model_loaded(self, _worker: Worker, message: ModelLoaded) -> None:
        """Seed the cost model, and let what was parked for this model go."""
        if message.model not in self._models:
            return
        if len(self._workers.with_model(message.model)) == 1:  # else the others have shown how long it really takes
            self._cost.seed_model(message.model, message.batch_s, message.buckets)
        self._models.count_workers(self._workers.with_model)
        for work in self.parked.take(message.model):
            self._enqueue(work)
        self.slots_back()
        self.kick()

    def model_failed(self, _worker: Worker, model: int, error: HeadraceError) -> None:
        """Where no other worker has it or may still load it, nobody can run what is parked for this model."""
        if self._workers.with_model(model) or self._workers.may_get(model):
            return
        for work in self.parked.take(model):
            fail(work, NotReady(error.text))

    def model_evicted(self, _worker: Worker, _model: int) -> None:
        """What waits for a version that no worker has any more waits for it to be loaded again."""
        self._models.count_workers(self._workers.with_model)
        self._park_homeless()

    def withdraw(self, model: ServedModel) -> None:
        """The model was unloaded by request: what waits for it is answered now, since nobody will run it."""
        self._models.count_workers(self._workers.with_model)
        waiting = [self._waiting.pop(queued.item) for queued in self._batcher.forget(model.number)]
        for work in (*waiting, *self.parked.take(model.number)):
            fail(work, unloaded(model))
        self._models.withdraw(model.number)

    def batch_done(self, worker: Worker, message: BatchDone) -> None:
        """Answers back to their requests."""
        now = now_s()
        running = self.running.done(message, now)
        if running is None:
            return
        batch = running.batch
        batch.cost_rows = cost_rows(batch, worker)
        if not running.aside:  # whose time is not what a batch in its row takes
            self._cost.observe(batch.key, batch.cost_rows, message.copy_s + message.run_s)
            self._batcher.ran(batch, message.copy_s + message.run_s)
        nobody = sum(self._answer(answer, message, batch) for answer in message.answers)
        model = self._models.get(batch.key.model)
        if model is not None:
            model.proven_s = now
            self.on_batch(model, batch, message, nobody)
        self.kick()

    def worker_lost(self, worker: Worker) -> None:
        """What it held goes to another one; what waits stays, for a worker that comes back in time if need be."""
        self.lost_workers += 1
        self.on_lost(lost := self.running.lost(worker))  # before any of it is marked for its second try
        suspects = {item.item for each in lost for item in each.batch.items}
        self._models.count_workers(self._workers.with_model)
        for entry in self._inflight.lost(worker.holder):
            self._retry(entry.job, suspect=entry.job.queued.item in suspects)
        self._park_homeless()
        self.slots_back()
        self.kick()

    def tick(self, pauses: Pauses) -> None:
        """Called a few times a second: kill what hangs, and try workers again that could not be sent a batch."""
        self._hangs.kill(now_s(), pauses)
        self._models.tidy()
        if self._workers.try_unreachable():
            self.kick()

    # ------------------------------------------------------------ inside

    def _enqueue(self, work: Work) -> None:
        if work.model.state.phase == "unloaded":  # what still comes out of the pool has nobody to run it
            fail(work, unloaded(work.model))
        elif not self._workers.with_model(work.model.number):
            self.parked.add(work)
        else:
            self._waiting[work.queued.item] = work
            self._batcher.add(work.queued)

    def _park_homeless(self) -> None:
        for work in [work for work in self._waiting.values() if not self._workers.with_model(work.model.number)]:
            self._batcher.remove(work.queued.item)
            del self._waiting[work.queued.item]
            self.parked.add(work)

    def _send_next(self, now: float) -> bool:
        if not len(self._batcher):
            return False
        for worker, models, only_full in self._choice.offers(now):
            if (not only_full or self._is_full(worker)) and self._send_to(worker, models, now):
                return True
        return False

    def _is_full(self, worker: Worker) -> bool:
        """Early staging is for one model only: it would put a whole batch ahead of a rare one that comes meanwhile."""
        (number,) = worker.loaded if len(worker.loaded) == 1 else (0,)
        return number > 0 and self._batcher.has_full(number)

    def _send_to(self, worker: Worker, models: set[int], now: float) -> bool:
        """Send the batcher's next batch; False when there is none for this worker."""
        batch = self._batcher.next_batch(
            now,
            worker_idle=not self.outstanding(worker),
            expected_rows=lambda model: self._models[model].preparing_rows,
            start_s=self.running.starts_s(worker, now),
            models=models,
        )
        if batch is None:
            return False
        works = [self._waiting.pop(item.item) for item in batch.items]
        alive = [work for work in works if not work.future.done()]
        if not alive:
            return True
        number, self._next_batch = self._next_batch, self._next_batch + 1
        aside = proves(alive)
        message = RunBatch(number, batch.key.model, [batch_item(work) for work in alive], batch.padded_rows, aside)
        try:
            sent = self._workers.send(worker, message)
        except FrameTooBig:
            for work in set_apart(alive):
                self._enqueue(work)
            return True
        if not sent:
            worker.reachable = False  # it is just dying: its loss is reported next
            for work in alive:
                self._enqueue(work)
            return True
        expected_s = self._cost.predict(batch.key, cost_rows(batch, worker))
        self.running.add(number, Running(batch, worker, now, expected_s, aside))
        for work in alive:
            self._inflight.add(work.queued.item, work, worker.holder, work.lease.inputs + work.lease.outputs, now)
        return True

    def _arm(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._batcher.due(now)
        if due is None:
            return
        self._timer = asyncio.get_running_loop().call_later(self._choice.sleep_s(now, due), self.kick)

    def _answer(self, answer: ItemAnswer, done: BatchDone, batch: Batch) -> int:
        """Settle one item; returns its rows when nobody waits for them any more."""
        entry = self._inflight.answered(answer.item)
        if entry is None:
            return 0
        if was_given_up(entry.job, answer):
            self._enqueue(entry.job)
            return 0
        if entry.job.future.done():
            self.slots_back()
        return settle(entry.job, answer, done, batch.rows, self.drops)

    def _retry(self, work: Work, *, suspect: bool) -> None:
        if may_try_again(work, self.drops, suspect=suspect):
            self._enqueue(work)

    def _left(self, work: Work) -> None:
        """The request has gone: out of the queue at once; if a worker has it, tell the worker, whose answer counts."""
        number = work.queued.item
        entry = self._inflight.get(number)
        if entry is None:
            if self.parked.pop(number) is None and self._waiting.pop(number, None) is not None:
                self._batcher.remove(number)
            work.drop(self.drops, Point.BATCH)
            return
        work.left = work.lease.terms.why_left(now_s())
        for worker in self._workers.workers():
            if worker.holder == entry.holder:
                self._workers.send(worker, CancelItems([number]))
