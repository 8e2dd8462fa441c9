"""What only a GPU can show: FP16 and back, the pinned arena, memory that runs out, an error that sticks."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from shared.settings import BatchingSettings, Settings
from shared.tensors import SlotRef, TensorSpec
from tests.support.worker_parts import ToyPipeline, TwoSidedArena, batch, item, loaded, toy_model
from workers.backends import torch_backend, torch_device
from workers.backends.base import OutOfMemory, Precision
from workers.backends.lane import Lane
from workers.backends.stream_runner import StreamRunner
from workers.backends.torch_device import CudaDevice
from workers.engine import run_batch
from workers.loading import Loader
from workers.model_pool import Key
from workers.networks.efficientnet_lite import efficientnet_lite0
from workers.staging import Inputs, Padding

MODEL_YAML = "pipeline: toy:Toy\nbackend: torch\nnetwork: mine:network\n"
CODE = "from torch import nn\n\n\ndef network():\n    return nn.Linear(4, 4)\n"


@pytest.fixture
def cuda() -> CudaDevice:
    device = torch_device.find("cuda:0", 0, 1)
    assert isinstance(device, CudaDevice)
    return device


def runner(device: CudaDevice, function: Callable[[torch.Tensor], torch.Tensor], precision: Precision) -> StreamRunner:
    class Function(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    return StreamRunner(Function(), ToyPipeline(), device, precision, 0)


def test_a_version_loads_warms_up_and_runs_in_fp16(tmp_path: Path, cuda: CudaDevice) -> None:
    linear = nn.Linear(4, 4)
    files = {"w.safetensors": safetensors.torch.save(linear.state_dict())}
    version = toy_model(tmp_path, "toy", MODEL_YAML, files, CODE)
    settings = Settings(repository=tmp_path, batching=BatchingSettings(max_rows=4, sizes=(1, 2, 4)))
    ready = Loader(settings, cuda).load(Key("toy", version.version))
    assert ready.precision == "fp16"
    assert ready.runner.pads
    assert ready.runner.memory_bytes > 0
    rows = np.random.default_rng(0).random((3, 4), np.float32)
    forward = ready.runner.run([[rows]], 4, "fp16")
    assert len(forward.outputs[0]) == len(forward.finite) == 3
    expected = linear(torch.from_numpy(rows)).detach()
    torch.testing.assert_close(torch.from_numpy(forward.outputs[0]), expected, rtol=1e-2, atol=1e-2)
    assert forward.copy_s > 0
    assert forward.run_s > 0


def test_a_version_is_measured_at_its_own_weights_whatever_ends_meanwhile(tmp_path: Path, cuda: CudaDevice) -> None:
    others = [torch.empty(64_000_000, dtype=torch.uint8, device=cuda.device)]  # of a batch of another version

    @contextlib.contextmanager
    def stages(stage: str) -> Iterator[None]:
        if stage == "device":
            others.clear()
        yield

    linear = nn.Linear(4, 4)
    files = {"w.safetensors": safetensors.torch.save(linear.state_dict())}
    version = toy_model(tmp_path, "toy", MODEL_YAML, files, CODE)
    before = torch.cuda.memory_allocated(cuda.device)
    ready = torch_backend.load(version, ToyPipeline(), cuda, "fp32", stages=stages)
    assert torch.cuda.memory_allocated(cuda.device) < before
    assert ready.memory_bytes == sum(parameter.nbytes for parameter in linear.parameters())


def test_an_overflow_in_fp16_is_answered_in_fp32(cuda: CudaDevice) -> None:
    weight = torch.full((4, 4), 1000.0, device="cuda")
    version = loaded(runner(cuda, lambda x: x @ weight, "fp16"))
    arena = TwoSidedArena()
    try:
        done = run_batch(batch(item(1, 1), item(2, 1000)), version, arena.attached, lambda: 0.0, set())
        assert [answer.failure for answer in done.answers] == [None, None]
        assert version.guard.total_rescued == 1
    finally:
        arena.close()


def test_rows_come_straight_from_the_pinned_arena(cuda: CudaDevice) -> None:
    arena = TwoSidedArena()
    cuda.attach(arena.attached.memory)
    try:
        slot = arena.owner.lease(2 * 16)
        assert slot is not None
        rows = arena.attached.array(slot.ref, "FP32", (2, 4))
        rows[...] = np.arange(8, dtype=np.float32).reshape(2, 4)
        assert torch.from_numpy(rows).is_pinned()
        assert cuda.is_pinned(rows)
        inline = np.frombuffer(np.full(4, 7, np.float32).tobytes(), np.float32).reshape(1, 4)  # read-only
        assert not cuda.is_pinned(inline)
        assert gathered(cuda, [[rows], [inline]], 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [7, 7, 7, 7], [0, 0, 0, 0]]
        short = np.ones((1, 2), np.float32)
        assert gathered(cuda, [[rows], [short]], 3)[2] == [1, 1, 0, 0]
    finally:
        cuda.detach()
        cuda.detach()
        arena.close()


def gathered(device: CudaDevice, items: Inputs, padded_rows: int) -> list[list[float]]:
    spec = TensorSpec(name="x", datatype="FP32", shape=(-1,))
    lane = Lane(device.streams, device.is_pinned, Padding((spec,)))
    with device.streams.copying():
        (rows,) = lane.gather(items, padded_rows)
    device.streams.settle()
    return cast("list[list[float]]", rows.cpu().tolist())


def test_each_of_several_arenas_is_pinned_until_it_is_let_go_of(cuda: CudaDevice) -> None:
    arenas = [TwoSidedArena(), TwoSidedArena()]
    rows = [arena.attached.array(SlotRef(0, 16), "FP32", (1, 4)) for arena in arenas]
    try:
        for arena in arenas:
            cuda.attach(arena.attached.memory)
        assert [cuda.is_pinned(each) for each in rows] == [True, True]
        cuda.detach(arenas[0].attached.memory)
        assert [cuda.is_pinned(each) for each in rows] == [False, True]
    finally:
        cuda.detach()
        for arena in arenas:
            arena.close()


def test_running_out_of_memory_is_no_end(cuda: CudaDevice) -> None:
    def greedy(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # raises: no GPU has a petabyte
        return x

    module = runner(cuda, greedy, "fp32")
    with pytest.raises(OutOfMemory):
        module.run([[np.ones((2, 4), np.float32)]], 2, "fp32")
    assert module.run([[np.ones((1, 4), np.float32)]], 1, "fp32").finite.all()


def test_an_ordinary_error_leaves_the_device_alone(cuda: CudaDevice) -> None:
    with pytest.raises(ValueError, match="mine"):
        runner(cuda, lambda _: _raise(ValueError("mine")), "fp32").run([[np.ones((1, 4), np.float32)]], 1, "fp32")


def _raise(error: Exception) -> torch.Tensor:
    raise error


STICKY = """
import numpy as np, torch
from tests.gpu.test_cuda_worker import runner
from workers.backends import torch_device
from workers.backends.base import DeviceLost
device = torch_device.find("cuda:0", 0, 1)
table = torch.zeros(4, device="cuda")
broken = runner(device, lambda x: x + table[(x[:, 0] + 1000).long()][:, None], "fp32")
try:
    broken.run([[np.ones((1, 4), np.float32)]], 1, "fp32")
except DeviceLost as lost:
    print("lost:", lost, flush=True)
    import os
    os._exit(72)
"""


def test_a_device_side_assert_is_told_as_a_lost_device() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    argv = [sys.executable, "-c", STICKY]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120, env=environment, cwd=root)
    assert done.returncode == 72, done.stderr
    assert "lost: cuda:0" in done.stdout


def test_the_default_network_agrees_with_the_cpu_at_every_batch_size(cuda: CudaDevice) -> None:
    torch.manual_seed(0)
    network = efficientnet_lite0().eval()
    images = torch.rand(8, 3, 224, 224) * 2 - 1
    with torch.inference_mode():
        expected = network(images)
        network.to(cuda.device)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's overloads
        on_device = images.to(cuda.device).contiguous(memory_format=torch.channels_last)
        for rows in (1, 3, 8):
            got = network(on_device[:rows]).cpu()
            torch.testing.assert_close(got, expected[:rows], rtol=1e-2, atol=1e-3)
