"""The online cost line: exact where the data is exact, deaf to strays, following what lasts."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cost_model import MOST_BUCKETS, CostLine, CostModel, QueueKey
from tests.support.simulation import repeatable

KEY = QueueKey(0)
SIZES = (1, 2, 4, 8, 16, 32)
FIXED_S, ROW_S = 0.002, 0.0001


def truth(rows: int) -> float:
    return FIXED_S + ROW_S * rows


def seeded() -> CostModel:
    model = CostModel()
    model.seed(KEY, [(rows, truth(rows)) for rows in SIZES])
    return model


def test_nothing_known_predicts_nothing() -> None:
    model = CostModel()
    assert model.predict(KEY, 8) == 0.0
    assert model.line(KEY) == CostLine(0.0, 0.0)
    assert model.slowest(KEY) == 0.0
    assert model.keys() == []
    assert repr(model) == "<CostModel empty>"


def test_warm_up_measurements_give_their_line() -> None:
    model = seeded()
    assert model.line(KEY) == pytest.approx((FIXED_S, ROW_S))
    assert model.predict(KEY, 24) == pytest.approx(truth(24))
    assert model.slowest(KEY) == truth(32)
    assert repr(model) == "<CostModel 0: 2.00 + 0.100·rows ms>"


def test_batches_of_one_size_leave_the_slope_as_it_was() -> None:
    model = seeded()
    random = repeatable(1)
    for _ in range(500):
        model.observe(KEY, 8, truth(8) * random.gauss(1, 0.03))
    for rows in SIZES:
        assert model.predict(KEY, rows) == pytest.approx(truth(rows), rel=0.05)


def test_the_slope_is_learned_without_warm_up() -> None:
    model = CostModel()
    random = repeatable(2)
    for _ in range(200):
        rows = random.randint(1, 32)
        model.observe(KEY, rows, truth(rows) * random.gauss(1, 0.02))
    for rows in SIZES:
        assert model.predict(KEY, rows) == pytest.approx(truth(rows), rel=0.15)


def test_the_slope_is_learned_against_wrong_warm_up() -> None:
    model = CostModel()
    model.seed(KEY, [(rows, 0.010) for rows in SIZES])  # flat
    for step in range(200):
        rows = SIZES[step % len(SIZES)]
        model.observe(KEY, rows, 0.001 * rows)
    assert model.predict(KEY, 32) == pytest.approx(0.032, rel=0.1)


def test_one_stray_batch_hardly_moves_the_line() -> None:
    model = seeded()
    before_s = model.predict(KEY, 8)
    model.observe(KEY, 8, 100 * truth(8))
    assert before_s <= model.predict(KEY, 8) <= 1.05 * before_s
    model.observe(KEY, 8, truth(8) / 100)
    assert model.predict(KEY, 8) == pytest.approx(before_s, rel=0.05)
    assert model.slowest(KEY) == 100 * truth(8)


def test_a_twentieth_of_strays_does_not_take_over() -> None:
    model = seeded()
    random = repeatable(3)
    for _ in range(2000):
        rows = random.choice(SIZES)
        model.observe(KEY, rows, truth(rows) * (20 if random.random() < 0.05 else random.gauss(1, 0.03)))
        assert model.predict(KEY, 8) < 1.3 * truth(8)


@pytest.mark.parametrize("factor", [0.5, 3.0, 10.0])
def test_a_lasting_change_is_followed_within_a_few_dozen_batches(factor: float) -> None:
    model = seeded()
    random = repeatable(4)
    for _ in range(60):
        rows = random.choice(SIZES)
        model.observe(KEY, rows, factor * truth(rows) * random.gauss(1, 0.03))
    for rows in SIZES:
        assert model.predict(KEY, rows) == pytest.approx(factor * truth(rows), rel=0.15)


def test_a_bucket_without_figures_borrows_those_of_its_model() -> None:
    model = seeded()
    long = QueueKey(0, (512,))
    assert model.predict(long, 8) == pytest.approx(truth(8))
    assert model.slowest(long) == 0.0
    model.observe(long, 8, 4 * truth(8))
    assert model.predict(long, 8) == pytest.approx(4 * truth(8))
    assert model.predict(long, 32) == pytest.approx(4 * truth(32), rel=0.01)  # the borrowed shape, scaled
    assert truth(8) < model.predict(KEY, 8) < 1.1 * truth(8)  # one batch says little of the model as a whole


def test_seeding_again_starts_afresh_but_keeps_the_slowest() -> None:
    model = seeded()
    model.observe(KEY, 8, 5.0)
    model.seed(KEY, [(1, 0.5), (2, 1.0)])
    assert model.line(KEY) == pytest.approx((0.0, 0.5))
    assert model.slowest(KEY) == 5.0
    model.seed(KEY, [])
    assert model.predict(KEY, 2) == pytest.approx(1.0)


def test_forgetting_a_model_leaves_the_others() -> None:
    model = seeded()
    model.observe(QueueKey(0, (64,)), 1, 1.0)
    model.observe(QueueKey(1), 1, 1.0)
    model.forget(0)
    assert model.keys() == [QueueKey(1)]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_measurements_that_can_not_be_are_ignored(seconds: float) -> None:
    model = seeded()
    before = model.line(KEY)
    model.observe(KEY, 8, seconds)
    model.observe(KEY, 0, 1.0)
    model.seed(KEY, [(8, seconds)])
    assert model.line(KEY) == before
    assert model.slowest(KEY) == truth(32)


BATCHES = st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 1e3)), max_size=40)


@settings(deadline=None)
@given(BATCHES, BATCHES)
def test_both_ends_are_never_negative_and_more_rows_never_cheaper(
    warm_up: list[tuple[int, float]], observed: list[tuple[int, float]]
) -> None:
    model = CostModel()
    model.seed(KEY, warm_up)
    for rows, seconds in observed:
        model.observe(KEY, rows, seconds)
        fixed_s, row_s = model.line(KEY)
        assert 0 <= fixed_s < math.inf
        assert 0 <= row_s < math.inf
        assert 0 < model.predict(KEY, rows) <= model.predict(KEY, rows + 1)
    every = warm_up + observed
    assert model.slowest(KEY) == max((seconds for _, seconds in every), default=0.0)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(1e-6, 0.1), st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_exact_data_stays_exact(fixed_s: float, row_s: float, observed: list[int]) -> None:
    model = CostModel()
    model.seed(KEY, [(rows, fixed_s + row_s * rows) for rows in SIZES])
    for rows in observed:
        model.observe(KEY, rows, fixed_s + row_s * rows)
    assert model.predict(KEY, 48) == pytest.approx(fixed_s + row_s * 48, rel=1e-3)


def test_shapes_that_callers_choose_are_bounded() -> None:
    model = CostModel()
    model.seed(QueueKey(1), [(1, 0.001), (8, 0.008)])
    for length in range(10_000):
        model.observe(QueueKey(1, (length,)), 1, 0.001)
    assert len(model.keys()) == MOST_BUCKETS + 1
    assert model.predict(QueueKey(1), 8) == pytest.approx(0.008)


def test_a_model_of_several_lengths_is_known_by_each_and_as_a_whole_by_what_comes() -> None:
    model = CostModel()
    lengths = [((length,), [(rows, rows * length * 1e-4) for rows in (1, 32)]) for length in (16, 64, 256)]
    model.seed_model(0, lengths[0][1], lengths)
    for (length,), measured in lengths:
        for rows, seconds in measured:
            assert model.predict(QueueKey(0, (length,)), rows) == pytest.approx(seconds, rel=0.01)
    assert model.predict(KEY, 32) == pytest.approx(32 * 64 * 1e-4, rel=0.01)  # the middle one, for a beginning
    for _ in range(200):
        model.observe(QueueKey(0, (16,)), 32, 32 * 16 * 1e-4)
    assert model.predict(KEY, 32) == pytest.approx(32 * 16 * 1e-4, rel=0.05)
    assert model.predict(QueueKey(0, (256,)), 32) == pytest.approx(32 * 256 * 1e-4, rel=0.01)
    assert model.predict(QueueKey(1, (256,)), 32) == 0.0
