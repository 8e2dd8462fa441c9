"""Worker time between models: examples by the clock, and the bounds of the rule over random loads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batcher import Batch, Batcher, BatchLimits, QueuedItem, QueueKey
from gateway.fair_share import LEVELS, Shares
from gateway.request import DEFAULT_PRIORITY
from tests.support.batching import nobody, numbers, somebody

SLOW, FAST = 0, 1
COST_S = {SLOW: 1 / 8, FAST: 1 / 256}  # sums are exact


def cost(key: QueueKey, rows: int) -> float:
    return COST_S.get(key.model, 0.01)


def limits(weight: float = 1.0, max_wait_s: float = 0.0, max_rows: int = 1) -> BatchLimits:
    return BatchLimits(max_rows=max_rows, max_wait_s=max_wait_s, sizes=(max_rows,), weight=weight)


def batcher(*weights: float, max_wait_s: float = 0.0, max_rows: int = 1) -> Batcher:
    made = Batcher(cost, caution=1.0, margin_s=0.0, lead_s=0.0)
    for model, weight in enumerate(weights or (1.0, 1.0)):
        made.configure(model, limits(weight, max_wait_s, max_rows))
    return made


class Line:
    """Adds items and takes batches, one after the other."""

    def __init__(self, queue: Batcher) -> None:
        self.queue = queue
        self.added = 0

    def add(self, model: int, count: int = 1, queued_s: float = 0.0, priority: int = DEFAULT_PRIORITY) -> None:
        for _ in range(count):
            new = QueuedItem(self.added, QueueKey(model), 1, 1e9, queued_s, priority=priority)
            self.queue.add(new)
            self.added += 1

    def take(self, now_s: float = 0.0) -> Batch:
        batch = self.queue.next_batch(now_s, worker_idle=True, expected_rows=nobody)
        assert batch is not None
        return batch

    def models(self, count: int) -> list[int]:
        return [self.take().key.model for _ in range(count)]


# ------------------------------------------------------------------ by the clock


def test_of_two_flooded_models_the_fast_one_runs_as_long_as_the_slow_one() -> None:
    line = Line(batcher())
    line.add(SLOW, 10)
    line.add(FAST, 500)
    assert line.models(99) == [SLOW, *[FAST] * 32] * 3


def test_a_rare_model_goes_next_however_long_the_others_have_waited() -> None:
    line = Line(batcher())
    line.add(SLOW, 100)
    line.models(7)
    line.add(FAST, queued_s=5.0)
    assert line.models(2) == [FAST, SLOW]


def test_what_was_not_used_while_idle_is_not_saved_up() -> None:
    line = Line(batcher())
    line.add(SLOW, 100)
    line.models(50)  # six seconds of the worker's time, all for one model
    line.add(FAST, 500)
    assert line.models(66) == [*[FAST] * 32, SLOW] * 2


def test_a_model_that_had_the_worker_to_itself_owes_its_last_batch_and_no_more() -> None:
    line = Line(batcher())
    line.add(SLOW, 50)
    line.models(50)
    line.add(FAST, 100)
    line.add(SLOW)
    assert line.models(34).index(SLOW) == 33  # of the same age in virtual time, the older item goes first


def test_a_heavier_model_gets_more() -> None:
    line = Line(batcher(1.0, 1.0, 3.0, 1.0))
    line.add(2, 100)
    line.add(3, 100)
    assert line.models(80).count(2) == 60


def test_a_batch_counts_for_what_it_really_took() -> None:
    line = Line(batcher(*[1.0] * 4))
    line.add(2, 10)
    line.add(3, 10)
    assert line.models(2) == [2, 3]
    slow = line.take()
    assert slow.key.model == 2
    line.queue.ran(slow, 0.01 + 0.05)  # predicted was 0.01
    assert line.models(6) == [3, 3, 3, 3, 3, 3]
    line.queue.ran(slow, 0.01)  # told again: only the difference counts
    assert line.take().key.model == 2


def test_priority_comes_before_shares_and_a_level_that_was_kept_waiting_has_no_claim_on_the_others() -> None:
    line = Line(batcher(*[1.0] * 4))
    line.add(SLOW, 50, priority=1)
    line.add(2, 10)
    assert line.models(50) == [SLOW] * 50  # six seconds in which model 2 got nothing
    line.add(3, 10)
    line.add(SLOW, 10)
    assert sorted(line.models(3)) == [SLOW, 2, 3]


def test_who_let_others_pass_while_waiting_for_company_keeps_the_claim_to_one_batch() -> None:
    line = Line(batcher(1.0, 1.0, 1.0, 1.0, max_wait_s=100.0, max_rows=2))
    line.add(2)  # waits for company
    line.add(3, 200)
    assert [numbers(line.queue.next_batch(0.0, worker_idle=False, expected_rows=somebody))[0] for _ in range(50)]
    line.add(2, 99)
    taken = [line.queue.next_batch(0.0, worker_idle=False, expected_rows=somebody) for _ in range(9)]
    assert [batch.key.model for batch in taken if batch] == [2, 2, 3, 2, 3, 2, 3, 2, 3]


def test_a_batch_of_another_model_does_not_get_in_front_of_one_that_it_would_hold_up() -> None:
    def sent(fast_waits_s: float) -> list[int]:
        made = Batcher(cost, caution=1.0, margin_s=0.0, lead_s=0.0)
        made.configure(SLOW, limits())
        made.configure(FAST, limits(max_wait_s=fast_waits_s, max_rows=8))
        line = Line(made)
        line.add(SLOW, 3)
        line.take()
        line.add(FAST)
        batch = made.next_batch(0.0, worker_idle=False, expected_rows=somebody)
        return [batch.key.model] if batch else []

    assert sent(0.12) == [FAST]  # ready within the slow batch: it would wait for most of it
    assert sent(0.13) == [SLOW]  # its company may come meanwhile


def test_buckets_and_suspects_of_a_model_count_together() -> None:
    made = batcher(*[1.0] * 4)
    for number in range(40):
        bucket = (64 * (number % 2),) if number < 20 else ()
        alone = 10 <= number < 20
        model = 2 if number < 20 else 3
        made.add(QueuedItem(number, QueueKey(model, bucket), 1, 1e9, 0.0, alone=alone))
    taken = [made.next_batch(0.0, worker_idle=True, expected_rows=nobody) for _ in range(20)]
    assert [batch.key.model for batch in taken if batch].count(2) == 10


def test_a_forgotten_model_leaves_no_share_behind_and_late_answers_of_it_are_no_matter() -> None:
    line = Line(batcher())
    line.add(SLOW, 2)
    batch = line.take()
    line.queue.forget(SLOW)
    line.queue.ran(batch, 1.0)
    line.queue.configure(SLOW, limits())
    line.queue.ran(batch, 1.0)
    line.add(SLOW)
    line.add(FAST)
    assert line.models(1) == [SLOW]


def test_made_up_priorities_do_not_pile_up() -> None:
    shares = Shares()
    held = [shares.join(0, priority) for priority in range(10)]
    for priority in range(10, 10 * LEVELS):
        shares.join(0, priority).queues -= 1
        assert len(shares) <= LEVELS
    assert all(shares.join(0, priority) is share for priority, share in enumerate(held))


def test_more_priorities_at_once_than_are_remembered_are_all_kept() -> None:
    shares = Shares()
    held = [shares.join(0, priority) for priority in range(5 * LEVELS)]
    assert len(shares) == 5 * LEVELS
    assert all(shares.join(0, priority) is share for priority, share in enumerate(held))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        limits(weight)


# ------------------------------------------------------------------ always

MODELS = st.lists(
    st.tuples(st.sampled_from([0.25, 1.0, 3.0]), st.sampled_from([0.001, 0.01, 0.1, 0.4])), min_size=2, max_size=5
)
NOISE = st.lists(st.sampled_from([0.25, 1.0, 2.0]), min_size=7, max_size=7)


class Rotation:
    """Models that never run out of items, on one worker that is given the next batch when it is free."""

    def __init__(self, models: list[tuple[float, float]], noise: list[float]) -> None:
        self.models = models
        self.noise = noise
        self.queue = Batcher(lambda key, _: models[key.model][1], caution=1.0, margin_s=0.0, lead_s=0.0)
        self.line = Line(self.queue)
        self.used_s = [0.0] * len(models)
        for model, (weight, _) in enumerate(models):
            self.queue.configure(model, limits(weight))

    def longest_s(self, model: int) -> float:
        return self.models[model][1] * max(self.noise)

    def run(self, batches: int) -> list[list[float]]:
        """What each model has used after each batch."""
        history = [list(self.used_s)]
        for number in range(batches):
            batch = self.line.take()
            model = batch.key.model
            self.line.add(model)
            took_s = self.models[model][1] * self.noise[number % len(self.noise)]
            self.queue.ran(batch, took_s)
            self.used_s[model] += took_s
            history.append(list(self.used_s))
        return history


@settings(deadline=None)
@given(MODELS, NOISE)
def test_no_window_leaves_a_waiting_model_short_of_its_share_by_more_than_the_longest_batches(
    models: list[tuple[float, float]], noise: list[float]
) -> None:
    rotation = Rotation(models, noise)
    for model in range(len(models)):
        rotation.line.add(model, 2)
    history = rotation.run(120)
    for one, (weight, _) in enumerate(models):
        for other, (other_weight, _) in enumerate(models):
            ahead = [used[other] / other_weight - used[one] / weight for used in history]
            grown = max(ahead[later] - min(ahead[: later + 1]) for later in range(len(ahead)))
            assert grown <= rotation.longest_s(one) / weight + rotation.longest_s(other) / other_weight + 1e-9


@settings(deadline=None)
@given(MODELS, NOISE, st.integers(1, 60))
def test_a_newcomer_waits_for_less_than_one_batch_of_each_other_model(
    models: list[tuple[float, float]], noise: list[float], before: int
) -> None:
    rotation = Rotation(models, noise)
    for model in range(1, len(models)):
        rotation.line.add(model, 2)
    rotation.run(before)
    rotation.line.add(0, 2)
    used = list(rotation.used_s)
    batches = 0
    while not rotation.used_s[0]:
        rotation.run(1)
        batches += 1
        assert batches <= 20 * len(models)
    for other in range(1, len(models)):
        assert rotation.used_s[other] - used[other] <= 2 * rotation.longest_s(other)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=20))
def test_while_anything_waits_an_idle_worker_gets_a_batch(adds: list[tuple[int, int]]) -> None:
    line = Line(batcher(0.001, 1.0, 1000.0, 7.0))
    for model, count in adds:
        line.add(model, count)
        line.take()
    while len(line.queue):
        line.take()
