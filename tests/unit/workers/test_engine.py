from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.typing import EventDict

from shared.errors import Code
from shared.messages import BatchDone, BatchItem, RunBatch
from shared.tensors import SlotRef, Tensor, as_array
from tests.support.worker_parts import (
    DEADLY,
    NEVER_FINITE,
    OVERFLOW,
    POISON,
    WIDTH,
    FakeRunner,
    TwoSidedArena,
    batch,
    item,
    loaded,
)
from workers.backends.base import DeviceLost, Precision
from workers.engine import refuse_all, run_batch
from workers.model_pool import LoadedVersion
from workers.precision import LIMIT_ROWS


@pytest.fixture
def arena() -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena()
    yield arena
    arena.close()


def run(
    message: RunBatch, version: LoadedVersion, arena: TwoSidedArena, *cancelled: int, now_s: float = 0.0
) -> BatchDone:
    return run_batch(message, version, arena.attached, lambda: now_s, set(cancelled))


def codes(done: BatchDone) -> dict[int, str | None]:
    return {answer.item: None if answer.failure is None else answer.failure.code for answer in done.answers}


def firsts(done: BatchDone, arena: TwoSidedArena) -> dict[int, list[float]]:
    return {
        answer.item: as_array(answer.tensors[0], arena.attached.memory)[:, 0].tolist()
        for answer in done.answers
        if answer.failure is None
    }


def test_every_item_gets_its_own_rows_back(arena: TwoSidedArena) -> None:
    done = run(batch(item(7, 1, 2), item(8, 3), item(9, 4, 5, 6)), loaded(FakeRunner()), arena)
    assert firsts(done, arena) == {7: [2, 4], 8: [6], 9: [8, 10, 12]}
    assert [answer.item for answer in done.answers] == [7, 8, 9]
    assert done.rows_run == 6
    assert (done.copy_s, done.run_s) == (0.001, 0.002)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1.0, 2.0, POISON]), min_size=1, max_size=33))
def test_poison_fails_alone_wherever_it_stands(values: list[float]) -> None:
    arena, runner = TwoSidedArena(), FakeRunner()
    try:
        done = run(batch(*(item(number, value) for number, value in enumerate(values))), loaded(runner), arena)
        expected = {number: Code.INTERNAL if value == POISON else None for number, value in enumerate(values)}
        assert codes(done) == expected
        assert firsts(done, arena) == {n: [value * 2] for n, value in enumerate(values) if value != POISON}
        assert len(runner.passes) <= 2 * len(values) - 1
    finally:
        arena.close()


def test_one_culprit_costs_two_passes_per_level(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    values = [1.0] * 32
    values[17] = POISON
    run(batch(*(item(number, value) for number, value in enumerate(values))), loaded(runner), arena)
    assert len(runner.passes) == 1 + 2 * 5


def test_the_text_for_a_culprit_tells_nothing_of_ours(arena: TwoSidedArena) -> None:
    done = run(batch(item(1, POISON)), loaded(FakeRunner()), arena)
    assert done.answers[0].failure is not None
    assert "bad row in here" not in done.answers[0].failure.text


def test_expired_and_cancelled_items_never_reach_the_device(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    message = batch(item(1, 1, deadline_s=5.0), item(2, 2, deadline_s=5.1), item(3, 3))
    done = run(message, loaded(runner), arena, 3, now_s=5.0)
    assert codes(done) == {1: Code.DEADLINE_EXCEEDED, 2: None, 3: Code.CANCELLED}
    assert [rows for rows, _, _ in runner.passes] == [[2.0]]
    assert done.rows_run == 1


def test_a_batch_nobody_wants_runs_nothing(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    done = run(batch(item(1, 1), item(2, 2)), loaded(runner), arena, 1, 2)
    assert codes(done) == {1: Code.CANCELLED, 2: Code.CANCELLED}
    assert runner.passes == []
    assert done.rows_run == 0


def test_items_that_expire_while_a_failed_batch_is_halved_are_not_run_again(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    times = iter([0.0, 0.0] + [10.0] * 20)
    message = batch(item(1, 1, deadline_s=5.0), item(2, POISON))
    done = run_batch(message, loaded(runner), arena.attached, lambda: next(times), set())
    assert codes(done) == {1: Code.DEADLINE_EXCEEDED, 2: Code.INTERNAL}


def test_outputs_go_into_the_slots_they_were_given(arena: TwoSidedArena) -> None:
    with arena.owner.lease(WIDTH * 4) as slot:  # type: ignore[union-attr]  # a fresh arena has room
        done = run(batch(item(1, 21, slots=[slot.ref])), loaded(FakeRunner()), arena)
        assert done.answers[0].tensors == [Tensor("y", "FP32", (1, WIDTH), slot.ref)]
        assert np.frombuffer(slot.view, "<f4").tolist() == [42, 0, 0, 0]


def test_inputs_are_read_from_slots(arena: TwoSidedArena) -> None:
    with arena.owner.lease(WIDTH * 4) as slot:  # type: ignore[union-attr]  # a fresh arena has room
        slot.view[:] = np.array([5, 0, 0, 0], "<f4").tobytes()
        message = BatchItem(1, 1e9, 1, [Tensor("x", "FP32", (1, WIDTH), slot.ref)], [])
        assert firsts(run(batch(message), loaded(FakeRunner()), arena), arena) == {1: [10]}


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", "FP32", (1, WIDTH + 1), bytes(4 * WIDTH + 4)),
        Tensor("x", "FP32", (2, WIDTH), bytes(8 * WIDTH)),
        Tensor("x", "FP32", (1, WIDTH), bytes(3)),
        Tensor("x", "INT32", (1, WIDTH), bytes(4 * WIDTH)),
        Tensor("x", "FP128", (1, WIDTH), bytes(4 * WIDTH)),
        Tensor("x", "FP32", (1, WIDTH), SlotRef(1 << 40, 4 * WIDTH)),
        Tensor("x", "FP32", (1, WIDTH), SlotRef(-64, 4 * WIDTH)),
        Tensor("x", "FP32", (1, -WIDTH), bytes(4 * WIDTH)),
    ],
)
def test_an_item_that_is_not_what_the_pipeline_declares_fails_alone(arena: TwoSidedArena, tensor: Tensor) -> None:
    bad = BatchItem(1, 1e9, 1, [tensor], [])
    assert codes(run(batch(bad, item(2, 2)), loaded(FakeRunner()), arena)) == {1: Code.INTERNAL, 2: None}


def test_an_item_without_tensors_or_with_a_short_slot_fails_alone(arena: TwoSidedArena) -> None:
    empty = BatchItem(1, 1e9, 1, [], [])
    short = item(2, 2, slots=[SlotRef(0, 3)])
    assert codes(run(batch(empty, short, item(3, 3)), loaded(FakeRunner()), arena)) == {
        1: Code.INTERNAL,
        2: Code.INTERNAL,
        3: None,
    }


def test_only_the_item_that_overflows_in_fp16_runs_again_in_fp32(arena: TwoSidedArena) -> None:
    runner = FakeRunner("fp16")
    done = run(batch(item(1, 1), item(2, OVERFLOW), item(3, 3)), loaded(runner), arena)
    assert codes(done) == {1: None, 2: None, 3: None}
    assert [(rows, precision) for rows, _, precision in runner.passes] == [
        ([1, OVERFLOW, 3], "fp16"),
        ([OVERFLOW], "fp32"),
    ]
    assert (done.rows_run, done.rows_rescued) == (4, 1)


def test_what_is_not_finite_in_fp32_either_is_refused_alone(arena: TwoSidedArena) -> None:
    precisions: tuple[Precision, ...] = ("fp16", "fp32")
    for precision in precisions:
        runner = FakeRunner(precision)
        done = run(batch(item(1, 1), item(2, 1, NEVER_FINITE), item(3, 3)), loaded(runner), arena)
        assert codes(done) == {1: None, 2: Code.NONFINITE_OUTPUT, 3: None}
        assert done.answers[1].failure is not None
        assert "1 of 2 row(s)" in done.answers[1].failure.text
        assert done.rows_rescued == 0


def test_a_version_that_overflows_too_often_runs_in_fp32_from_then_on(arena: TwoSidedArena) -> None:
    runner = FakeRunner("fp16")
    version = loaded(runner)
    for _ in range(LIMIT_ROWS):
        run(batch(item(1, OVERFLOW)), version, arena)
    assert version.precision == "fp32"
    runner.passes.clear()
    run(batch(item(1, OVERFLOW)), version, arena)
    assert [precision for _, _, precision in runner.passes] == ["fp32"]


def test_inputs_that_are_never_finite_do_not_count_against_fp16(arena: TwoSidedArena) -> None:
    version = loaded(FakeRunner("fp16"))
    for _ in range(LIMIT_ROWS * 2):
        run(batch(item(1, NEVER_FINITE)), version, arena)
    assert version.precision == "fp16"


def test_running_out_of_memory_halves_the_batch_and_is_remembered(arena: TwoSidedArena) -> None:
    runner = FakeRunner(memory_rows=3)
    version = loaded(runner)
    items = [item(number, number) for number in range(8)]
    assert set(codes(run(batch(*items), version, arena)).values()) == {None}
    assert version.row_cap == 2
    runner.passes.clear()
    assert set(codes(run(batch(*items), version, arena)).values()) == {None}
    assert [len(rows) for rows, _, _ in runner.passes] == [2, 2, 2, 2]


def test_an_item_too_large_for_the_device_is_refused_alone(arena: TwoSidedArena) -> None:
    version = loaded(FakeRunner(memory_rows=1))
    done = run(batch(item(1, 1, 2), item(2, 3)), version, arena)
    assert codes(done) == {1: Code.OVERLOADED, 2: None}


def test_a_lost_device_ends_it_all(arena: TwoSidedArena) -> None:
    with pytest.raises(DeviceLost):
        run(batch(item(1, 1), item(2, DEADLY)), loaded(FakeRunner()), arena)


def test_a_whole_batch_is_padded_as_told_and_its_parts_to_the_next_allowed_size(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    items = [item(number, POISON if number == 5 else 1) for number in range(6)]
    run(batch(*items, padded_rows=8), loaded(runner), arena)
    assert [(len(rows), padded) for rows, padded, _ in runner.passes] == [
        (6, 8),
        (3, 4),
        (3, 4),
        (1, 1),
        (2, 2),
        (1, 1),
        (1, 1),
    ]


def test_padding_below_the_rows_is_corrected(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    run(batch(item(1, 1, 2, 3), padded_rows=1), loaded(runner), arena)
    assert runner.passes[0][1] == 3


def test_refuse_all_answers_each_item_once() -> None:
    done = refuse_all(batch(item(1, 1), item(2, 1)), Code.NOT_READY, "not loaded", 3.0)
    assert codes(done) == {1: Code.NOT_READY, 2: Code.NOT_READY}
    assert done.started_s == 3.0


def test_a_model_that_raises_on_every_row_writes_few_traces(arena: TwoSidedArena, logged: list[EventDict]) -> None:
    version = loaded(FakeRunner())
    poison = batch(*(item(number, POISON) for number in range(32)))
    for now_s in (0.0, 5.0, 11.0):
        run(poison, version, arena, now_s=now_s)
    traces = [line for line in logged if line["event"] == "an item failed"]
    assert [line["left_out"] for line in traces] == [0, 63]
    assert [str(line["exc_info"]) for line in traces] == ["bad row in here"] * 2
    halvings = [line for line in logged if line["event"] == "a batch failed and is halved"]
    assert [(line["items"], line["left_out"]) for line in halvings] == [(32, 0), (32, 61)]
    other = loaded(FakeRunner())
    run(batch(item(1, POISON)), other, arena, now_s=12.0)
    assert logged[-1]["left_out"] == 0, "each model has its own"


@pytest.mark.parametrize(
    ("pads", "failed", "cap"), [(True, 8, 3), (True, 7, 3), (True, 3, 1), (True, 1, 1), (False, 8, 4), (False, 7, 3)]
)
def test_where_batches_are_padded_the_cap_is_a_size_they_are_padded_to(pads: bool, failed: int, cap: int) -> None:
    runner = FakeRunner()
    runner.pads = pads
    version = loaded(runner, sizes=(1, 3, 8))
    version.lower_row_cap(failed)
    assert version.row_cap == cap
    assert not pads or version.padded(cap) <= max(1, failed // 2)
