"""The runner for devices that work beside the host, on a device of simulated time."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from shared.tensors import Array
from tests.support.fake_streams import FakeDevice, FakeGraph, FakeStreams
from tests.support.worker_parts import WIDTH, ToyPipeline
from workers.backends.base import DeviceLost, OutOfMemory
from workers.backends.stream_runner import StreamRunner
from workers.backends.streams import Function as Captured


class Function(nn.Module):
    """A network that is a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def runner(
    streams: FakeStreams, function: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * 2, *, pinned: bool = True
) -> StreamRunner:
    return StreamRunner(Function(function), ToyPipeline(), FakeDevice(streams, pinned=pinned), "fp32", 0)


def rows(*firsts: float) -> Array:
    """Rows as they lie in the arena: writable."""
    array = np.zeros((len(firsts), WIDTH), np.float32)
    array[:, 0] = firsts
    return array


def inline(*firsts: float) -> Array:
    """Rows as they lie in a message: read-only."""
    array = rows(*firsts)
    array.flags.writeable = False
    return array


def firsts(outputs: list[Array]) -> list[float]:
    return list(outputs[0][:, 0])


def test_a_pass_is_copied_computed_and_timed_by_the_device() -> None:
    streams = FakeStreams(copy_s=1.0, row_s=10.0)
    forward = runner(streams).run([[rows(1, 2)], [inline(3)]], 4, "fp32")
    assert firsts(forward.outputs) == [2, 4, 6]
    assert forward.finite.tolist() == [True] * 3
    assert (forward.copy_s, forward.run_s) == (3.0, 40.0)  # the padded size is what is computed


@pytest.mark.parametrize("pinned", [True, False])
def test_rows_are_copied_from_where_they_lie_only_if_the_device_can(pinned: bool) -> None:
    streams = FakeStreams()
    module = runner(streams, pinned=pinned)
    array = rows(1)
    under_way = module.start([[array]], 1, "fp32", 0)
    array[0, 0] = 7  # nothing has been copied yet, since no time has passed
    assert firsts(under_way.wait().outputs) == ([14] if pinned else [2])


def test_items_of_different_lengths_are_filled_up_with_zeros() -> None:
    streams = FakeStreams()
    module = runner(streams, lambda x: x + 1)
    module.run([[np.full((2, WIDTH), 9, np.float32)]], 2, "fp32")  # what the lane holds from before is not seen
    forward = module.run([[np.full((1, 2), 5, np.float32)], [np.full((1, WIDTH), 6, np.float32)]], 2, "fp32")
    assert forward.outputs[0].tolist() == [[6, 6, 1, 1], [7, 7, 7, 7]]


def test_the_padding_holds_zeros_not_the_rows_of_an_older_batch() -> None:
    streams = FakeStreams()
    module = runner(streams, lambda x: x + x.sum())
    module.run([[rows(9, 9, 9, 9)]], 4, "fp32")
    assert firsts(module.run([[rows(1)]], 4, "fp32").outputs) == [2]


def test_the_next_batch_is_copied_while_the_first_one_is_computed() -> None:
    streams = FakeStreams(copy_s=1.0, row_s=10.0)
    module = runner(streams)
    first = module.start([[rows(1, 2)]], 2, "fp32", 0)
    second = module.start([[rows(3, 4)]], 2, "fp32", 1)
    one, other = streams.of("computing", "call")
    assert [(step.start_s, step.end_s) for step in streams.of("copies", "copy")] == [(0, 2), (2, 4)]
    assert (one.start_s, one.end_s) == (2, 22), "it starts when its own rows have come"
    assert (other.start_s, other.end_s) == (22, 42), "the device goes straight on to the next batch"
    assert not first.done()
    assert firsts(first.wait().outputs) == [2, 4]
    assert streams.now_s == 22, "the second batch was not waited for"
    assert (first.done(), second.done()) == (True, False)
    assert firsts(second.wait().outputs) == [6, 8]


def test_computing_never_starts_before_its_own_rows_have_come() -> None:
    streams = FakeStreams(copy_s=100.0, row_s=1.0)
    module = runner(streams)
    under_way = [module.start([[rows(number)]], 1, "fp32", number) for number in (0, 1)]
    assert [step.start_s for step in streams.of("computing", "call")] == [100, 200]
    assert [firsts(each.wait().outputs) for each in under_way] == [[0], [2]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("graphs", [False, True])
def test_no_buffer_is_used_again_before_it_is_free(seed: int, graphs: bool) -> None:
    """Whatever takes how long: two lanes in turn give every row its own answer."""
    random = np.random.default_rng(seed)
    streams = FakeStreams(
        copy_s=float(random.choice([0.1, 1, 30])), row_s=float(random.choice([0.1, 1, 30])), host_s=random.random()
    )
    module = runner(streams)
    if graphs:
        assert module.prepare([np.arange(4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)], [1, 2, 4]) == (1, 2, 4)
    under_way: list[tuple[list[float], object]] = []
    for number in range(12):
        values = [float(value) for value in random.integers(0, 1000, random.integers(1, 5))]
        items = [[rows(value) if value % 2 else inline(value)] for value in values]
        padded = next(size for size in (1, 2, 4) if size >= len(values))
        under_way.append((values, module.start(items, padded, "fp32", number % 2)))
        if len(under_way) == 2:
            values, first = under_way.pop(0)
            assert firsts(first.wait().outputs) == [2 * value for value in values]  # type: ignore[attr-defined]


def test_every_started_pass_rings_when_it_has_ended() -> None:
    streams = FakeStreams(copy_s=1.0, row_s=10.0)
    module = runner(streams)
    module.run([[rows(1)]], 1, "fp32")
    assert streams.rung == []
    under_way = module.start([[rows(1)]], 1, "fp32", 0)
    (mark,) = streams.rung
    mark.wait()
    assert under_way.done()


def test_when_a_pass_fails_to_start_nothing_of_it_is_queued_any_more() -> None:
    streams = FakeStreams(copy_s=5.0)

    def raises(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        runner(streams, raises).start([[rows(1)]], 1, "fp32", 0)
    assert streams.now_s >= streams.steps[-1].end_s, "its slots may be given to somebody else now"


def test_running_out_of_memory_is_told_as_such() -> None:
    streams = FakeStreams()
    streams.memory_rows = 2
    module = runner(streams)
    with pytest.raises(OutOfMemory):
        module.run([[rows(1, 2, 3)]], 3, "fp32")
    assert firsts(module.run([[rows(1, 2)]], 2, "fp32").outputs) == [2, 4]


# ------------------------------------------------------------------ graphs


EXAMPLE = [np.arange(4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)]


def test_each_size_runs_from_its_graph_and_only_in_its_own_precision() -> None:
    streams = FakeStreams()
    module = runner(streams)
    assert module.prepare(EXAMPLE, [1, 2, 4]) == (1, 2, 4)
    assert module.memory_bytes == 3000 + EXAMPLE[0].nbytes
    streams.steps.clear()
    for count in (1, 2, 4):
        assert firsts(module.run([[rows(*range(count))]], count, "fp32").outputs) == [2 * n for n in range(count)]
    assert len(streams.of("computing", "replay")) == 3
    assert streams.of("computing", "call") == []
    module.precision = "fp16"  # then FP32 is the way back from an overflow
    module.run([[rows(1)]], 1, "fp32")
    assert len(streams.of("computing", "call")) == 1


def test_graphs_of_another_version_are_not_counted() -> None:
    """Nor anything else that happens on the device meanwhile: a version is what it holds itself."""
    streams = FakeStreams()
    module, other = runner(streams), runner(streams)
    capture = streams.capture

    def crowded(function: Captured, inputs: Sequence[torch.Tensor], pool: object) -> FakeGraph:
        if not other.graphs.sizes:
            streams.capture = capture  # type: ignore[method-assign]
            other.prepare(EXAMPLE, [1, 2, 4])
        return capture(function, inputs, pool)

    streams.capture = crowded  # type: ignore[method-assign]
    module.prepare(EXAMPLE, [1, 2])
    inputs = EXAMPLE[0][:2].nbytes
    assert module.memory_bytes == 2000 + inputs
    assert other.memory_bytes == 3000 + EXAMPLE[0].nbytes
    module.weigh()
    assert module.memory_bytes == 2000 + inputs, "asking again adds nothing"


def test_sizes_and_shapes_without_a_graph_run_eagerly() -> None:
    streams = FakeStreams()
    module = runner(streams, lambda x: torch.zeros(len(x), WIDTH) + x.sum(1, keepdim=True))
    module.prepare(EXAMPLE, [2])
    streams.steps.clear()
    assert firsts(module.run([[rows(1, 2, 3)]], 3, "fp32").outputs) == [1, 2, 3]
    assert firsts(module.run([[np.ones((2, 7), np.float32)]], 2, "fp32").outputs) == [7, 7]
    assert streams.of("computing", "replay") == []


def test_the_largest_graph_comes_first_and_its_inputs_serve_all() -> None:
    order: list[int] = []
    streams = FakeStreams()
    capture = streams.capture

    def noted(function: object, inputs: list[torch.Tensor], pool: object) -> object:
        order.append(len(inputs[0]))
        assert inputs[0].data_ptr() == module.graphs._largest[0].data_ptr()
        return capture(function, inputs, pool)  # type: ignore[arg-type]  # passed on

    streams.capture = noted  # type: ignore[method-assign,assignment]  # looks on
    module = runner(streams)
    module.prepare(EXAMPLE, [1, 2, 4])
    assert order == [4, 2, 1]


def test_a_network_that_can_not_be_captured_runs_eagerly_and_says_why_once() -> None:
    streams = FakeStreams()
    streams.no_graph = RuntimeError("operation not permitted when stream is capturing\nmore")
    module = runner(streams)
    with capture_logs() as logs:
        assert module.prepare(EXAMPLE, [1, 2, 4]) == ()
    (line,) = logs
    assert line["sizes"] == [1, 2, 4]
    assert line["reason"] == "RuntimeError: operation not permitted when stream is capturing"
    assert firsts(module.run([[rows(1)]], 1, "fp32").outputs) == [2]
    assert module.memory_bytes == 0


def test_a_graph_that_answers_differently_is_not_used() -> None:
    streams = FakeStreams()
    streams.changed_by_graph = 0.5
    module = runner(streams)
    with capture_logs() as logs:
        assert module.prepare(EXAMPLE, [1, 2]) == ()
    assert logs[0]["reason"] == "its answers differ from the network's own"
    assert firsts(module.run([[rows(1)]], 1, "fp32").outputs) == [2]


def test_a_number_built_in_at_capture_shows_on_other_rows() -> None:
    built_in: list[float] = []

    class Capturing(FakeStreams):
        def capture(self, function: object, inputs: object, pool: object) -> object:  # type: ignore[override]  # looks on
            built_in.append(float(inputs[0].sum()))  # type: ignore[index]  # as `.item()` in a network would
            return super().capture(
                lambda x: (x[0] * 0 + built_in[-1], torch.ones(len(x[0]), dtype=torch.bool)), inputs, pool
            )  # type: ignore[arg-type]  # passed on

    streams = Capturing()
    module = runner(streams, lambda x: x * 0 + x.sum())
    with capture_logs():
        assert module.prepare(EXAMPLE, [2]) == ()


def test_a_device_lost_while_capturing_ends_the_load() -> None:
    class Lost(FakeDevice):
        def judge(self, error: Exception) -> Exception:
            return DeviceLost("gone")

    streams = FakeStreams()
    streams.no_graph = RuntimeError("an illegal memory access was encountered")
    module = StreamRunner(Function(lambda x: x), ToyPipeline(), Lost(streams), "fp32", 0)
    with pytest.raises(DeviceLost):
        module.prepare(EXAMPLE, [1])
