"""Which batches run before a version is ready, and what is measured of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.lengths import Shapes
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Result
from shared.settings import BatchingSettings
from shared.tensors import Array, TensorSpec
from tests.support.worker_parts import ToyPipeline
from workers import warm_up as module
from workers.backends.base import Forward, LoadFailed, OutOfMemory, Precision, Runner
from workers.staging import Inputs
from workers.warm_up import Steps, Warmth, warm_up


class Lengths(Pipeline[Options]):
    """INT32 [-1], padded up to 4, 8 or 16."""

    def __init__(self, lengths: Sequence[int] = (4, 8, 16)) -> None:
        super().__init__(Config(), Path(), ())
        self.lengths = lengths

    @property
    def spec(self) -> PipelineSpec:
        outputs = (TensorSpec(name="y", datatype="FP32", shape=(1,)),)
        return PipelineSpec(
            kind="text", inputs=(TensorSpec(name="x", datatype="INT32", shape=(-1,), fill=-1),), outputs=outputs
        )

    def warm_shapes(self) -> Sequence[Shapes]:
        return [((length,),) for length in self.lengths]

    def preprocess(self, item: RawInput, options: Options, out: list[Array]) -> Prepared:
        return Prepared([])

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: Options) -> list[Result]:
        return []

    def example(self) -> RawInput:
        return RawInput(kind="text")


class Recorder(Runner):
    """Remembers (rows, length) of each pass; more elements than `memory` do not fit."""

    memory_bytes = 0
    pads = True

    def __init__(self, precision: Precision = "fp32", memory: int = 1 << 30) -> None:
        self.precision = precision
        self.memory = memory
        self.passes: list[tuple[int, int]] = []
        self.planned: list[tuple[int, tuple[int, ...]]] = []
        """Per call of `prepare`: the rows' length, and the sizes."""
        self.rescues: list[tuple[int, int]] = []

    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:
        ((rows,),) = items
        if rows.size > self.memory:
            raise OutOfMemory(f"no memory for {rows.shape}")
        (self.rescues if precision != self.precision else self.passes).append((len(rows), rows.shape[1]))
        return Forward([], np.ones(len(rows), np.bool_), 0.0, 0.0)

    def prepare(self, rows: Sequence[Array], sizes: Sequence[int]) -> Sequence[int]:
        self.planned.append((rows[0].shape[1], tuple(sizes)))
        return sizes


def warmed(
    runner: Runner, pipeline: Pipeline[Any], stops_after: int = 1000, *, graphs: bool = True, **batching: object
) -> Warmth:
    passes: list[float] = []
    steps = Steps(lambda: len(passes) >= stops_after, passes.append)
    settings = BatchingSettings.model_validate({"max_rows": 8, "sizes": (1, 2, 4, 8), **batching})
    return warm_up(runner, pipeline, settings, "toy", steps, graphs=graphs)


def sizes_of(warmth: Warmth) -> dict[tuple[int, ...], list[int]]:
    return {bucket: [size for size, _ in measured] for bucket, measured in warmth.buckets}


def test_rows_of_one_shape_are_run_at_every_size() -> None:
    runner = Recorder()
    warmth = warmed(runner, ToyPipeline())
    assert [size for size, _ in warmth.batch_s] == [1, 2, 4, 8]
    assert (warmth.buckets, warmth.row_cap) == ([], None)
    assert runner.planned == [(4, (1, 2, 4, 8))]


def test_every_length_is_run_at_every_size_and_measured() -> None:
    runner = Recorder()
    warmth = warmed(runner, Lengths())
    assert sizes_of(warmth) == {(4,): [1, 2, 4, 8], (8,): [1, 2, 4, 8], (16,): [1, 2, 4, 8]}
    assert warmth.batch_s == warmth.buckets[0][1]
    assert all(seconds > 0 for _, measured in warmth.buckets for _, seconds in measured)
    assert {(rows, length) for rows in (1, 2, 4, 8) for length in (4, 8, 16)} == set(runner.passes)
    assert [length for length, _ in runner.planned] == [16, 8, 4], "the largest first: graphs share its memory"


def test_a_budget_of_tokens_bounds_the_rows_of_each_length() -> None:
    runner = Recorder()
    warmth = warmed(runner, Lengths(), max_tokens=48)
    assert sizes_of(warmth) == {(4,): [1, 2, 4, 8], (8,): [1, 2, 4, 6], (16,): [1, 2, 3]}
    assert max(rows * length for rows, length in runner.passes) <= 48


def test_without_time_long_batches_are_run_with_one_row_and_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LENGTHS_S", 0.0)
    assert sizes_of(warmed(Recorder(), Lengths())) == {(4,): [1, 2, 4, 8], (8,): [1, 8], (16,): [1, 8]}


def test_what_does_not_fit_the_memory_bounds_the_rows_of_all() -> None:
    warmth = warmed(Recorder(memory=16 * 5), Lengths())
    assert warmth.row_cap == 4
    assert sizes_of(warmth)[16,] == [1, 2, 4]
    assert warmed(Recorder(memory=4 * 5), ToyPipeline()).row_cap == 4


def test_a_row_that_does_not_fit_fails_the_load() -> None:
    with pytest.raises(LoadFailed, match=r"model toy: 1 row\(s\) do not fit the device's memory"):
        warmed(Recorder(memory=15), Lengths())


def test_a_stop_is_noticed_between_two_passes() -> None:
    runner = Recorder()
    with pytest.raises(LoadFailed, match="the worker stops"):
        warmed(runner, Lengths(), stops_after=9)
    assert len(runner.passes) <= 10


def test_the_way_back_from_an_overflow_is_warm_at_every_length() -> None:
    runner = Recorder("fp16")
    warmed(runner, Lengths(), graphs=False)
    assert runner.rescues == [(1, 4), (1, 8), (1, 16)]
    assert runner.planned == []
