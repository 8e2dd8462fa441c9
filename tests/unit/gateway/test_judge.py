import asyncio
import contextlib
from typing import Any, Literal

import pytest

from gateway import judge as module
from gateway.batcher import Batch, QueuedItem, QueueKey
from gateway.guard import Guard
from gateway.judge import Judge
from gateway.metrics import Metrics
from gateway.orders import Order, RollBack
from gateway.request import DEFAULT_PRIORITY, PROOF_PRIORITY, SHADOW_PRIORITY, Request, StageTimes
from gateway.running import Busy
from gateway.served import ServedModel, Terms
from gateway.split import Split
from shared.clock import now_s
from shared.errors import Code, InternalFault, NotReady
from shared.messages import BatchDone
from shared.pipeline import RawInput
from shared.settings_base import GuardSettings
from shared.traffic import Traffic
from tests.support.gateway_parts import served

LIMIT_S = 5.0
NAME = "words"


def version(number: int, name: str = NAME) -> ServedModel:
    model = served(number, name=name)
    model.state.version = f"{number:016x}"
    return model


class Orders:
    """Takes orders; `hold` keeps them waiting, `fails` refuses them."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Order, str]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.fails: list[Exception] = []

    async def __call__(self, name: str, order: Order, by: str) -> Traffic:
        self.given.append((name, order, by))
        await self.hold.wait()
        if self.fails:
            raise self.fails.pop()
        return Traffic(current="0" * 16)


class Court:
    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - of the guard
        self.orders = Orders()
        self.judge = Judge(GuardSettings(**settings), 1, lambda _queue, rows: 0.001 * rows)
        self.judge.order = self.orders
        self.old, self.new = version(1), version(2)

    def point(self, percent: float = 50.0, *, shadow: bool = False, canary: ServedModel | None = None) -> None:
        self.judge.pointed(NAME, Split(self.old, canary or self.new, percent, "routing_key", shadow))

    def guard(self) -> Guard:
        return self.judge._watched[NAME].guard

    def fail(self, model: ServedModel, times: int = 1, code: Code | None = Code.INTERNAL) -> None:
        for _ in range(times):
            self.judge.saw(model, code, 0.01, StageTimes())

    async def settled(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.judge._ordered:
                await asyncio.wait(self.judge._ordered.values())

    def requests(self) -> dict[str, int]:
        return {figures.version: figures.requests for figures in self.judge.figures(NAME)}


async def test_a_guard_is_made_for_each_canary_kept_while_it_stands_and_dropped_with_it() -> None:
    court = Court()
    court.judge.pointed(NAME, Split(court.old))
    assert (court.judge._watched, court.judge.figures(NAME)) == ({}, [])
    court.point(5.0)
    first = court.guard()
    court.point(5.0)
    assert court.guard() is first
    court.fail(court.new, 3, None)
    court.judge.pointed(NAME, Split(court.old))
    assert court.judge._watched == {}
    assert court.requests()[court.new.version] == 3, "the last canary's figures are still told"
    court.point(5.0)
    assert court.guard() is not first
    assert court.requests()[court.new.version] == 0
    court.judge.pointed(NAME, None)
    assert court.judge._watched == {}


async def test_another_pair_of_versions_gets_a_guard_of_its_own() -> None:
    court = Court()
    court.point()
    seen = [court.guard()]
    court.point(canary=version(3))
    seen.append(court.guard())
    court.point(canary=version(3), shadow=True)
    seen.append(court.guard())
    court.old = version(4)
    court.point()
    seen.append(court.guard())
    assert len({id(guard) for guard in seen}) == 4


async def test_a_changed_share_begins_another_stretch_and_keeps_the_figures() -> None:
    court = Court()
    court.point(5.0)
    court.fail(court.new, 3, None)
    court.point(5.0)
    assert court.guard()._stretch == 1
    court.point(25.0)
    assert (court.guard()._stretch, court.guard()._canary.recent) == (2, 0)
    assert court.requests()[court.new.version] == 3
    assert court.judge._watched[NAME].split.percent == 25.0


async def test_a_bad_canary_is_rolled_back_by_one_order_that_names_it() -> None:
    court = Court()
    court.point()
    court.orders.hold.clear()
    court.fail(court.old, 30, None)
    court.fail(court.new, 60)
    await asyncio.sleep(0)
    ((name, order, by),) = court.orders.given
    assert isinstance(order, RollBack)
    assert (name, by, order.ends) == (NAME, "guard", court.new.version)
    assert order.reason.startswith("error rate 100 % of ")
    assert order.figures["measure"] == "error rate"
    court.orders.hold.set()
    court.judge.pointed(NAME, Split(court.old))  # as the order does
    await court.settled()
    court.fail(court.new, 60)
    assert len(court.orders.given) == 1


@pytest.mark.parametrize("error", [NotReady("the disk is full"), KeyError("a bug")])
async def test_an_order_that_failed_is_given_again_later(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    court = Court()
    court.orders.fails.append(error)
    court.point()
    court.fail(court.new, 60)
    await asyncio.sleep(0)
    court.fail(court.new, 60)
    assert len(court.orders.given) == 1, "not before the wait is over"
    await court.settled()
    court.fail(court.new)
    await court.settled()
    assert len(court.orders.given) == 2


async def test_one_model_s_order_keeps_no_other_s_canary() -> None:
    court = Court()
    court.orders.hold.clear()
    court.point()
    other_old, other_new = version(5, "other"), version(6, "other")
    court.judge.pointed("other", Split(other_old, other_new, 50.0))
    court.fail(court.new, 60)
    court.fail(other_new, 60)
    await asyncio.sleep(0)
    assert [name for name, _, _ in court.orders.given] == [NAME, "other"]
    court.orders.hold.set()
    await court.settled()


def request(version: str = "") -> Request:
    now = now_s()
    return Request(NAME, version, "id", [RawInput(kind="text", data=b"x")], {}, now + 1, now, 1)


def end(
    court: Court,
    model: ServedModel,
    error: Exception | None = None,
    reused: Literal["", "kept", "shared"] = "",
    named: str = "",
) -> None:
    """One request, as the flow measures it."""
    metrics, asked = Metrics(), request(named)
    metrics.judged = court.judge.answered
    with contextlib.suppress(InternalFault), metrics.request(asked) as measured:
        measured.routed(model)
        measured.terms = Terms(asked.deadline_s, asked.priority)
        asked.times.reused = reused
        asked.times.nonfinite_rows = 2
        if error is not None:
            raise error


async def test_what_was_reused_says_nothing_about_a_version() -> None:
    court = Court()
    court.point()
    ways: tuple[Literal["kept"], Literal["shared"]] = ("kept", "shared")
    for reused in ways:
        end(court, court.new, reused=reused)
        end(court, court.new, InternalFault(), reused)
    assert court.requests()[court.new.version] == 0
    end(court, court.new)
    end(court, court.new, InternalFault())
    _, canary = court.judge.figures(NAME)
    assert (canary.requests, canary.errors, canary.nonfinite) == (2, 1, 2)


async def test_whose_caller_chose_the_version_says_nothing_about_it() -> None:
    court = Court()
    court.point()
    for _ in range(100):
        end(court, court.new, InternalFault(), named=court.new.version)
        end(court, court.old, named=court.old.version)
    await asyncio.sleep(0)
    assert court.requests() == {court.old.version: 0, court.new.version: 0}
    assert court.orders.given == []


async def test_a_canary_that_ends_its_workers_is_rolled_back_at_the_third_input() -> None:
    court = Court()
    court.point(5.0)
    court.fail(court.old, 30, None)
    lost = StageTimes(ended_workers=1)
    for given in (0, 0, 1):
        court.judge.saw(court.new, Code.PROCESS_LOST, 3.0, lost)
        await asyncio.sleep(0)
        assert len(court.orders.given) == given
    ((_, order, _),) = court.orders.given
    assert isinstance(order, RollBack)
    assert order.reason == ("ended its worker twice with each of 3 inputs, the current version did so with 0 of 30")
    assert order.figures["measure"] == "ended workers"


def batch_of(model: ServedModel, *, alone: bool = False, priority: int = DEFAULT_PRIORITY) -> Batch:
    key = QueueKey(model.number, ())
    item = QueuedItem(1, key, 1, 1.0, 0.0, priority=priority)
    item.alone = alone
    return Batch(key, [item], 1, 1)


async def test_a_canary_with_which_two_workers_more_are_lost_is_rolled_back_whoever_asked() -> None:
    court = Court()
    court.point(5.0)
    court.judge.lost_worker(version(9, "other"), batch_of(court.new))
    for model, alone, given in (
        (court.new, False, 0),
        (court.new, True, 0),  # a second try
        (court.old, False, 0),
        (court.new, False, 0),  # two, and one of the current version's
        (court.new, False, 1),
    ):
        court.judge.lost_worker(model, batch_of(model, alone=alone, priority=PROOF_PRIORITY))
        await asyncio.sleep(0)
        assert len(court.orders.given) == given
    ((_, order, _),) = court.orders.given
    assert isinstance(order, RollBack)
    assert order.reason == "a worker died or hung with 3 of its batches, with 1 of the current version's"


async def test_who_is_late_for_a_worker_that_the_other_version_has_lost_is_not_held_against_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    court, now = Court(), 100.0
    monkeypatch.setattr(module, "now_s", lambda: now)
    court.point()

    def late(model: ServedModel, seconds: float = 1.0, code: Code = Code.DEADLINE_EXCEEDED) -> int:
        before = court.requests()[model.version]
        court.judge.saw(model, code, seconds, StageTimes())
        return court.requests()[model.version] - before

    assert late(court.old) == 1
    court.judge.lost_worker(court.new, batch_of(court.new))
    assert (late(court.old), late(court.new)) == (0, 1)
    assert late(court.old, code=Code.INTERNAL) == 1, "it raised: no worker does that"
    now = 103.0
    ran(court, court.new, DEFAULT_PRIORITY)
    assert late(court.old) == 0, "the other one is not back yet"
    ran(court, court.old, PROOF_PRIORITY)
    now = 104.0
    assert (late(court.old, 1.5), late(court.old, 0.5)) == (0, 1), "who came before it was back; who came later"
    court.judge.lost_worker(court.old, batch_of(court.old))
    assert (late(court.old), late(court.new)) == (1, 0)
    now = 104.0 + module.TROUBLE_LIMIT_S + 2.0
    assert late(court.new) == 1, "that is no reason for ever"


async def test_who_is_late_while_a_batch_of_the_other_version_hangs_is_not_held_against_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    court, now = Court(slow_factor=2.0), 100.0
    monkeypatch.setattr(module, "now_s", lambda: now)
    court.point()
    full_s = 0.001 * court.new.max_rows
    hangs = Busy(QueueKey(court.new.number, ()), 100.0)
    court.judge.busy = lambda: [None, Busy(None, 0.0), Busy(QueueKey(7, ()), 0.0), hangs]
    for run_s, counted in ((1.9 * full_s, [1, 1]), (2.1 * full_s, [1, 2])):
        now = 100.0 + run_s
        for model in (court.old, court.new):
            court.judge.saw(model, Code.DEADLINE_EXCEEDED, 0.5, StageTimes())
        assert list(court.requests().values()) == counted


async def test_a_model_without_a_canary_and_a_version_that_is_not_compared_change_nothing() -> None:
    court = Court()
    court.fail(court.new, 60)
    court.point()
    court.fail(version(9), 60)
    court.fail(version(9, "other"), 60)
    assert court.requests() == {court.old.version: 0, court.new.version: 0}
    assert court.orders.given == []


def ran(court: Court, model: ServedModel, priority: int, run_s: float = 0.001, rows: int = 1) -> None:
    key = QueueKey(model.number, ())
    batch = Batch(key, [QueuedItem(1, key, 1, 1.0, 0.0, priority=priority)], 1, 1)
    batch.cost_rows = 1
    court.judge.ran(model, batch, BatchDone(1, [], 0.0, 0.0, run_s, rows))


@pytest.mark.parametrize("shadow", [False, True])
async def test_proofs_do_not_count_whatever_the_canary_is(shadow: bool) -> None:
    court = Court()
    court.point(shadow=shadow)
    for model in (court.old, court.new):
        ran(court, model, PROOF_PRIORITY, 9.0)
        ran(court, model, DEFAULT_PRIORITY, rows=0)  # nothing was run
    assert [figures.batches for figures in court.judge.figures(NAME)] == [0, 0]
    ran(court, court.new, SHADOW_PRIORITY)
    ran(court, court.old, DEFAULT_PRIORITY)
    assert [figures.batches for figures in court.judge.figures(NAME)] == [1, int(shadow)]


async def test_a_batch_that_holds_a_request_for_a_named_version_says_nothing_about_it() -> None:
    court = Court()
    court.point()
    for model in (court.old, court.new):
        key = QueueKey(model.number, ())
        items = [QueuedItem(number, key, 1, 1.0, 0.0, chosen=number == 2) for number in (1, 2)]
        for held, batches in ((items, 0), (items[:1], 1)):
            batch = Batch(key, held, len(held), len(held))
            batch.cost_rows = len(held)
            court.judge.ran(model, batch, BatchDone(1, [], 0.0, 0.0, 9.0, len(held)))
            assert {each.version: each.batches for each in court.judge.figures(NAME)}[model.version] == batches


async def test_batches_are_held_against_what_the_current_version_needs() -> None:
    court = Court(slow_factor=2.0)
    court.point()
    court.fail(court.old, 40, None)
    court.fail(court.new, 40, None)
    for _ in range(60):
        ran(court, court.old, DEFAULT_PRIORITY, 0.001)
        ran(court, court.new, DEFAULT_PRIORITY, 0.010)
    current, canary = court.judge.figures(NAME)
    assert (current.slow, canary.slow) == (0, 60)
    await asyncio.sleep(0)
    ((_, order, _),) = court.orders.given
    assert isinstance(order, RollBack)
    assert order.figures["measure"] == "slow batches"


async def test_a_shadow_that_answers_otherwise_is_ended() -> None:
    court = Court()
    court.point(shadow=True)
    court.fail(court.new, 30, None)
    for _ in range(60):
        court.judge.compared(court.new, agrees=False)
    await asyncio.sleep(0)
    ((_, order, _),) = court.orders.given
    assert isinstance(order, RollBack)
    assert order.figures["measure"] == "disagreement"


async def test_a_copy_of_a_shadow_that_was_ended_is_not_held_against_the_next_one() -> None:
    court = Court()
    court.point(shadow=True)
    ended, court.new = court.new, version(3)
    court.point(shadow=True)
    court.fail(court.new, 30, None)
    for _ in range(60):
        court.judge.compared(ended, agrees=False)
    _, canary = court.judge.figures(NAME)
    assert (canary.compared, canary.disagreed, court.orders.given) == (0, 0, [])
    court.judge.compared(version(4, "other"), agrees=False)


async def test_switched_off_it_only_counts() -> None:
    court = Court(enabled=False)
    court.point()
    court.fail(court.new, 100)
    await asyncio.sleep(0)
    assert (court.orders.given, court.requests()[court.new.version]) == ([], 100)


async def test_there_is_evidence_after_enough_answers_with_each_share() -> None:
    court = Court(min_samples=20)
    assert court.judge.has_evidence(NAME), "nothing is to be judged"
    court.point(5.0)
    court.fail(court.old, 100, None)
    court.fail(court.new, 19, None)
    court.fail(court.new, 5, Code.INVALID_INPUT)
    assert not court.judge.has_evidence(NAME)
    court.fail(court.new, 1, None)
    assert court.judge.has_evidence(NAME)
    court.point(25.0)
    assert not court.judge.has_evidence(NAME), "as many again with this share"
    court.fail(court.new, 20, None)
    assert court.judge.has_evidence(NAME)
    off = Court(enabled=False)
    off.point()
    assert off.judge.has_evidence(NAME)
