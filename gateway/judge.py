"""Keeps a guard for each canary, tells it what happens, and orders the rollback that it asks for. On the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, TypeAlias

from gateway.batcher import Batch, QueueKey
from gateway.figures import VersionFigures
from gateway.guard import Guard, Pair, Verdict
from gateway.metrics import MeasuredRequest
from gateway.orders import GUARD, Order, RollBack
from gateway.request import PROOF_PRIORITY, SHADOW_PRIORITY, StageTimes
from gateway.running import Busy
from gateway.served import ServedModel
from gateway.split import Split
from shared.clock import now_s
from shared.errors import Code, HeadraceError
from shared.logs import get_logger
from shared.messages import BatchDone
from shared.settings_base import GuardSettings
from shared.traffic import Traffic

log = get_logger()

AGAIN_S = 5.0
"""After an order that failed, the canary's next bad answer after so long orders it again."""

TROUBLE_LIMIT_S = 60.0
"""How long after a lost worker another version's late answers are put down to that: a worker is back sooner."""

GiveOrder: TypeAlias = Callable[[str, Order, str], Awaitable[Traffic]]
Predict: TypeAlias = Callable[[QueueKey, int], float]


class _Watched(NamedTuple):
    """One canary beside the version that it is compared with."""

    split: Split[ServedModel]
    guard: Guard


class _Trouble:
    """What one version's batch has done to the other version's callers: its worker was lost, and has to come back."""

    __slots__ = ("culprit", "over_s")

    def __init__(self, culprit: ServedModel, over_s: float) -> None:
        self.culprit = culprit
        self.over_s = over_s
        """Who came before (monotonic) may be late for that reason; at the latest, until a batch has come back."""


class Judge:
    """By model's name; models without a canary cost one look-up a request."""

    def __init__(self, settings: GuardSettings, gateways: int, predict: Predict) -> None:
        """`predict(queue, rows)`: seconds of a batch, as learned. `gateways`: each of them judges what it sees."""
        self._settings = settings
        self._gateways = gateways
        self._predict = predict
        self._watched: dict[str, _Watched] = {}
        self._trouble: dict[str, _Trouble] = {}
        self._ended: dict[str, list[VersionFigures]] = {}
        """Figures of each model's last canary."""
        self._ordered: dict[str, asyncio.Task[None]] = {}
        self.busy: Callable[[], Iterable[Busy | None]] = tuple
        """What each worker does at the moment; set by the composition."""
        self.order: GiveOrder
        """Set by the composition."""

    def pointed(self, name: str, split: Split[ServedModel] | None) -> None:
        """A model's traffic has changed; None: it is served no more."""
        before = self._watched.get(name)
        self._trouble.pop(name, None)
        canary = split.canary if split is not None else None
        if split is None or canary is None:
            if before is not None:
                self._ended[name] = before.guard.figures()
                del self._watched[name]
            return
        if before is not None and _same(before.split, split):
            if before.split.percent != split.percent:
                before.guard.restart()
            self._watched[name] = before._replace(split=split)
            return
        pair = Pair(split.current.version, canary.version, split.shadow)
        self._watched[name] = _Watched(split, Guard(self._settings, self._gateways, pair))

    def has_evidence(self, name: str) -> bool:
        """Whether a model's canary may have more callers: it has been judged with those that it has.

        True when the guard is switched off, or there is no canary. For a shadow its copies count.
        """
        watched = self._watched.get(name)
        return watched is None or watched.guard.has_evidence

    def figures(self, name: str) -> list[VersionFigures]:
        """Of the present canary and the current version, else of the last one; empty when there was none."""
        watched = self._watched.get(name)
        return watched.guard.figures() if watched is not None else self._ended.get(name, [])

    def answered(self, measured: MeasuredRequest, outcome: Code | None, seconds: float) -> None:
        """A caller's request has ended.

        One that was not computed for itself says nothing about the version; one that chose its version is none of the
        traffic that is divided, and might be sent to end a canary.
        """
        model, request = measured.model, measured.request
        if model is None or not self._watched or request.times.reused or request.version:
            return
        self.saw(model, outcome, seconds, request.times, admitted=measured.terms is not None)

    def saw(
        self, model: ServedModel, outcome: Code | None, seconds: float, times: StageTimes, *, admitted: bool = True
    ) -> None:
        """A request, or a copy of one, was answered by a version or failed."""
        watched = self._watched.get(model.name)
        if watched is None or (outcome is Code.DEADLINE_EXCEEDED and self._is_held_up(watched, model, seconds)):
            return
        guard, version = watched.guard, model.version
        guard.observed(version, outcome, seconds, admitted=admitted, nonfinite_rows=times.nonfinite_rows)
        if times.ended_workers:
            guard.ended_workers(version, times.ended_workers)
        self._conclude(model.name, watched)

    def ran(self, model: ServedModel, batch: Batch, done: BatchDone) -> None:
        """A batch has come back. Proofs do not count: they run at other times than callers' batches.

        Nor does one that holds an input whose caller chose the version, and might have it slow on purpose.
        """
        watched, trouble = self._watched.get(model.name), self._trouble.get(model.name)
        if trouble is not None and trouble.culprit is not model:
            trouble.over_s = min(trouble.over_s, now_s())
        priority = batch.items[0].priority
        if watched is None or not done.rows_run or priority == PROOF_PRIORITY:
            return
        if priority == SHADOW_PRIORITY and not watched.split.shadow:
            return  # what was left of copies
        if any(item.chosen for item in batch.items):
            return
        expected_s = self._predict(QueueKey(watched.split.current.number, batch.key.bucket), batch.cost_rows)
        watched.guard.ran(model.version, done.copy_s + done.run_s, expected_s)
        self._conclude(model.name, watched)

    def lost_worker(self, model: ServedModel, batch: Batch) -> None:
        """A worker was lost while it ran this batch. That costs everybody, so it counts whoever asked.

        A second try, which is alone, is no further sign.
        """
        watched = self._watched.get(model.name)
        if watched is None:
            return
        self._trouble[model.name] = _Trouble(model, now_s() + TROUBLE_LIMIT_S)
        if not batch.items[0].alone:
            watched.guard.lost_worker(model.version)
            self._conclude(model.name, watched)

    def compared(self, shadow: ServedModel, *, agrees: bool) -> None:
        """A shadow's answer was held against the current version's; nothing happens for one that was ended since."""
        watched = self._watched.get(shadow.name)
        if watched is not None and watched.split.canary is shadow:
            watched.guard.compared(agrees=agrees)
            self._conclude(shadow.name, watched)

    def canaries(self) -> list[ServedModel]:
        """Those that are compared."""
        return [each.split.canary for each in self._watched.values() if each.split.canary is not None]

    def unloadable(self, model: ServedModel) -> None:
        """A version could not be loaded. A canary is ended, while the current version can answer.

        Else one that is loaded on demand would be tried again every few seconds, by callers of whom each waits until
        that fails; and one that was lost with its worker would have its share again at any time, without an order.
        """
        watched = self._watched.get(model.name)
        if watched is None or watched.split.canary is not model or model.state.phase != "failed":
            return
        current = watched.split.current
        if current.state.phase == "ready" or current.waits_for_load:
            self._end(model.name, watched, Verdict(f"can't be loaded: {model.state.reason}", {"measure": "load"}))

    def _is_held_up(self, watched: _Watched, model: ServedModel, seconds: float) -> bool:
        """Whether a version's late answer, `seconds` after it was asked for, is the other one's doing.

        The other one's batch had its worker lost meanwhile, or runs for so long now that the worker may be ended soon.
        """
        split, now, trouble = watched.split, now_s(), self._trouble.get(model.name)
        if trouble is not None and trouble.culprit is not model and now - seconds <= trouble.over_s:
            return True
        others = {each.number: each.max_rows for each in (split.current, split.canary) if each and each is not model}
        for busy in self.busy():
            if busy is None or busy.key is None or busy.key.model not in others:
                continue
            full_s = self._predict(QueueKey(split.current.number, busy.key.bucket), others[busy.key.model])
            if full_s and now - busy.since_s > self._settings.slow_factor * full_s:
                return True
        return False

    def _conclude(self, name: str, watched: _Watched) -> None:
        verdict = watched.guard.verdict() if name not in self._ordered else None
        if verdict is not None:
            self._end(name, watched, verdict)

    def _end(self, name: str, watched: _Watched, verdict: Verdict) -> None:
        canary = watched.split.canary
        if canary is None or name in self._ordered or not self._settings.enabled:
            return
        log.warning("canary rolled back", model=name, version=canary.version, reason=verdict.reason)
        order = RollBack(verdict.reason, dict(verdict.figures), canary.version)
        self._ordered[name] = asyncio.get_running_loop().create_task(self._roll_back(name, order))

    async def _roll_back(self, name: str, order: RollBack) -> None:
        try:
            await self.order(name, order, GUARD)
        except HeadraceError as error:
            log.error("the rollback failed", model=name, version=order.ends, reason=error.text)  # noqa: TRY400 - foreseen
            await asyncio.sleep(AGAIN_S)
        except Exception:  # a bug must not be met again by each answer
            log.exception("the rollback failed", model=name, version=order.ends)
            await asyncio.sleep(AGAIN_S)
        finally:
            del self._ordered[name]


def _same(before: Split[ServedModel], after: Split[ServedModel]) -> bool:
    """Whether the same two versions are compared in the same way."""
    return (before.current, before.canary, before.shadow) == (after.current, after.canary, after.shadow)
