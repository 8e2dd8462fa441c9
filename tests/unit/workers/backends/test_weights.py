import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.stack import ROOT
from workers.backends import weights
from workers.backends.base import LoadFailed

LAYERS, WIDTH = 50, 1024
SIZE = LAYERS * (WIDTH * WIDTH + WIDTH) * 4

PROBE = f"""
import sys
from pathlib import Path
import torch
from torch import nn
from workers.backends import torch_backend, weights
from workers.backends.torch_device import TorchDevice

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

torch.set_num_threads(1)
weights.fill(nn.utils.skip_init(nn.Linear, 2, 2), Path(sys.argv[2]), "warm")  # what torch imports for it
before = peak()
network = nn.Sequential(*(nn.utils.skip_init(nn.Linear, {WIDTH}, {WIDTH}) for _ in range({LAYERS})))
weights.fill(network, Path(sys.argv[1]), "big")
torch_backend._place(network, TorchDevice(torch.device("cpu")))
assert float(network[7].weight[3, 5]) == 7.0
print(peak() - before)
"""


def test_a_load_needs_the_memory_of_one_network(tmp_path: Path) -> None:
    network = nn.Sequential(*(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)))
    state = {key: tensor.fill_(int(key.partition(".")[0])) for key, tensor in network.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "big.safetensors")
    safetensors.torch.save_file(nn.Linear(2, 2).state_dict(), tmp_path / "small.safetensors")
    argv = [sys.executable, "-c", PROBE, str(tmp_path / "big.safetensors"), str(tmp_path / "small.safetensors")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert 0.9 * SIZE < int(done.stdout) < 1.2 * SIZE


def test_every_weight_arrives_however_few_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    for number, tensor in enumerate(given.state_dict().values()):
        tensor.fill_(number + 1)
    safetensors.torch.save_file(given.state_dict(), tmp_path / "w.safetensors")
    for limit in (1, 40, 10_000):
        monkeypatch.setattr(weights, "MAPPED_BYTES", limit)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
        weights.fill(network, tmp_path / "w.safetensors", "m")
        assert all(torch.equal(tensor, given.state_dict()[key]) for key, tensor in network.state_dict().items())


def test_halves_in_the_file_become_what_the_network_has(tmp_path: Path) -> None:
    given = nn.Linear(2, 2).half()
    safetensors.torch.save_file(given.state_dict(), tmp_path / "w.safetensors")
    network = nn.Linear(2, 2)
    weights.fill(network, tmp_path / "w.safetensors", "m")
    assert network.weight.dtype == torch.float32
    assert torch.equal(network.weight.half(), given.weight)


def _refused(path: Path) -> str:
    with pytest.raises(LoadFailed) as caught:
        weights.fill(nn.Linear(2, 2), path, "m")
    assert str(path.parent) not in caught.value.text
    return caught.value.text


def test_truncated_and_lying_files_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    whole = safetensors.torch.save(nn.Linear(2, 2).state_dict())
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert "model m: w.safetensors can't be read as safetensors" in _refused(path)
    path.write_bytes(whole + b"\0")
    assert "can't be read as safetensors" in _refused(path)
    header = {"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 2**40]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    assert "can't be read as safetensors" in _refused(path)
    path.write_bytes(struct.pack("<Q", 2**62) + bytes(100))
    assert "can't be read as safetensors" in _refused(path)
    path.unlink()
    assert "can't be read (" in _refused(path)


def test_whole_numbers_in_place_of_floating_point_ones_are_refused_with_the_key(tmp_path: Path) -> None:
    for dtype, word in ((torch.int64, "I64"), (torch.int8, "I8"), (torch.bool, "BOOL")):
        file = tmp_path / "w.safetensors"
        safetensors.torch.save_file({"weight": torch.zeros(2, 2).to(dtype), "bias": torch.zeros(2)}, file)
        text = f"model m: weight weight is {word} in the file, the network wants float32 (1 of 2 differ)"
        assert _refused(file) == text


def test_floating_point_numbers_in_place_of_whole_ones_are_refused_with_the_key(tmp_path: Path) -> None:
    given = {key: tensor.float() for key, tensor in nn.BatchNorm2d(4).state_dict().items()}
    safetensors.torch.save_file(given, tmp_path / "w.safetensors")
    with pytest.raises(LoadFailed, match=r"weight num_batches_tracked is F32 in the file, the network wants int64"):
        weights.fill(nn.BatchNorm2d(4), tmp_path / "w.safetensors", "m")
