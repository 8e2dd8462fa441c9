"""What the fake device only claims: that copies really run beside computing, and graphs really replay."""

import select
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from shared.tensors import Array
from tests.support.worker_parts import WIDTH, ToyPipeline, TwoSidedArena, batch, item, loaded
from workers.backends import torch_device
from workers.backends.base import Precision
from workers.backends.stream_runner import StreamPass, StreamRunner
from workers.backends.torch_device import CudaDevice
from workers.engine import BatchRun
from workers.flight import Flight
from workers.networks.efficientnet_lite import efficientnet_lite0

LIMIT_S = 30.0
SPIN_CYCLES = 100_000_000
"""Some 50 ms of a GPU clock."""


@pytest.fixture
def cuda() -> CudaDevice:
    device = torch_device.find("cuda:0", 0, 1)
    assert isinstance(device, CudaDevice)
    return device


@pytest.fixture
def arena(cuda: CudaDevice) -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena(64 << 20)
    cuda.attach(arena.attached.memory)
    yield arena
    cuda.detach()
    arena.close()


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def runner(
    device: CudaDevice, function: Callable[[torch.Tensor], torch.Tensor], precision: Precision = "fp32"
) -> StreamRunner:
    return StreamRunner(Function(function), ToyPipeline(), device, precision, 0)


def floats(array: Array) -> npt.NDArray[np.float32]:
    return np.asarray(array, np.float32)


def slow_double(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]  # torch annotates it not
    return x * 2


def rows_in(arena: TwoSidedArena, count: int, value: float) -> Array:
    slot = arena.owner.lease(count * WIDTH * 4)
    assert slot is not None
    rows = arena.attached.array(slot.ref, "FP32", (count, WIDTH))
    rows[...] = value
    return rows


def test_the_host_is_back_before_the_device_is_done_and_the_bell_tells(cuda: CudaDevice) -> None:
    under_way = runner(cuda, slow_double).start([[np.ones((1, WIDTH), np.float32)]], 1, "fp32", 0)
    assert not under_way.done()
    assert select.select([cuda.fileno()], [], [], LIMIT_S)[0], "the bell has rung"
    assert under_way.done()
    cuda.quiet()
    assert not select.select([cuda.fileno()], [], [], 0)[0]
    assert under_way.wait().outputs[0].tolist() == [[2] * WIDTH]


def test_the_second_batch_is_copied_while_the_first_one_is_computed(cuda: CudaDevice, arena: TwoSidedArena) -> None:
    module = runner(cuda, slow_double)
    many = 100_000
    module.run([[rows_in(arena, many, 1)]], many, "fp32")  # buffers and kernels are warm
    first = module.start([[rows_in(arena, many, 2)]], many, "fp32", 0)
    second = module.start([[rows_in(arena, many, 3)]], many, "fp32", 1)
    answers = [under_way.wait().outputs[0] for under_way in (first, second)]
    assert [float(answer.min()) for answer in answers] == [float(answer.max()) for answer in answers] == [4, 6]
    began = first.marks.began
    assert second.marks.copied.after_s(began) < first.marks.ended.after_s(began), "beside the first batch's compute"
    assert second.marks.started.after_s(began) >= first.marks.ended.after_s(began), "and computed behind it"


def test_a_graph_answers_as_the_network_does_and_queues_faster(cuda: CudaDevice) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(100))).to(cuda.device).eval()
    layers.requires_grad_(requires_grad=False)
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    for precision in precisions:
        module = runner(cuda, layers, precision)
        cuda.streams.settle()
        example = [np.random.default_rng(0).random((8, WIDTH), np.float32)]
        eager = module.run([[example[0][:3]]], 4, precision).outputs[0].copy()
        before = module.memory_bytes
        with capture_logs() as logs:
            assert module.prepare(example, [1, 2, 4, 8]) == (1, 2, 4, 8), logs
        assert module.memory_bytes > before, "graphs keep memory of their own"
        for _ in range(3):
            got = module.run([[example[0][:3]]], 4, precision).outputs[0]
            np.testing.assert_allclose(floats(got), floats(eager), rtol=1e-3, atol=1e-4)


def test_graphs_of_all_sizes_share_memory_and_never_each_others_rows(cuda: CudaDevice) -> None:
    module = runner(cuda, lambda x: (x * 2).relu() + 1)
    module.prepare([np.random.default_rng(0).random((8, WIDTH), np.float32)], [1, 2, 4, 8])
    random = np.random.default_rng(1)
    under_way: list[tuple[Array, StreamPass]] = []
    for number in range(40):
        rows: Array = random.random((int(random.integers(1, 9)), WIDTH), np.float32)
        padded = next(size for size in (1, 2, 4, 8) if size >= len(rows))
        under_way.append((rows, module.start([[rows]], padded, "fp32", number % 2)))
        if len(under_way) == 2:
            rows, first = under_way.pop(0)
            np.testing.assert_allclose(floats(first.wait().outputs[0]), floats(rows) * 2 + 1, rtol=1e-6)


def test_a_network_that_waits_for_the_device_runs_eagerly(cuda: CudaDevice) -> None:
    module = runner(cuda, lambda x: x * float(x.sum().item() > -1))
    with capture_logs() as logs:
        assert module.prepare([np.ones((2, WIDTH), np.float32)], [1, 2]) == ()
    assert logs[-1]["event"] == "batch sizes without a CUDA graph"
    assert module.run([[np.ones((1, WIDTH), np.float32)]], 1, "fp32").outputs[0].tolist() == [[1] * WIDTH]


def test_an_overflow_beside_a_staged_batch_runs_again_in_fp32(cuda: CudaDevice, arena: TwoSidedArena) -> None:
    weight = torch.full((WIDTH, WIDTH), 1000.0, device=cuda.device)
    cuda.streams.settle()
    module = runner(cuda, lambda x: x @ weight, "fp16")
    module.prepare([np.ones((2, WIDTH), np.float32)], [1, 2])
    version = loaded(module)
    flight = Flight(cuda)
    for number in (1, 2):
        message = batch(item(10 * number, number), item(10 * number + 1, 1000), number=number)
        flight.start(BatchRun(message, version, arena.attached, lambda: 0.0, set()))
    for number in (1, 2):
        message, done = flight.finish()
        assert message.batch == number
        assert [answer.failure for answer in done.answers] == [None, None]
        assert (done.rows_run, done.rows_rescued) == (3, 1)


def test_running_out_of_memory_halves_and_remembers(cuda: CudaDevice, arena: TwoSidedArena) -> None:
    def greedy(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 3:
            torch.empty(1 << 50, dtype=torch.uint8, device=cuda.device)  # raises: no GPU has a petabyte
        return x * 2

    version = loaded(runner(cuda, greedy))
    flight = Flight(cuda)
    for number in (0, 1):
        message = batch(*(item(8 * number + place, place) for place in range(8)), number=number)
        flight.start(BatchRun(message, version, arena.attached, lambda: 0.0, set()))
    for _ in range(2):
        _, done = flight.finish()
        assert [answer.failure for answer in done.answers] == [None] * 8
    assert version.row_cap == 2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_default_network_runs_from_graphs_at_every_size(cuda: CudaDevice, precision: Precision) -> None:
    torch.manual_seed(0)
    network = efficientnet_lite0().eval().requires_grad_(requires_grad=False)
    features = nn.Sequential(nn.Linear(WIDTH, 3 * 64 * 64), nn.Unflatten(1, (3, 64, 64)), network, nn.LazyLinear(WIDTH))
    features(torch.zeros(1, WIDTH))
    features = features.eval().requires_grad_(requires_grad=False).to(cuda.device)
    features.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's overloads
    cuda.streams.settle()
    module = runner(cuda, features, precision)
    example = [np.random.default_rng(0).random((8, WIDTH), np.float32)]
    for size in (1, 2, 4, 8):
        module.run([[example[0][:size]]], size, precision)
    assert module.prepare(example, [1, 2, 4, 8]) == (1, 2, 4, 8)
