from pathlib import Path

import pytest

from shared import devices
from shared.devices import cuda_devices, worker_count
from shared.settings import WorkerSettings


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """What the driver shows in /proc and /dev; nothing yet."""
    proc, dev = tmp_path / "gpus", tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (dev / name).touch()
    return proc, dev


def four(machine: tuple[Path, Path]) -> None:
    for number in range(4):
        (machine[1] / f"nvidia{number}").touch()


def test_without_a_driver_there_is_none(machine: tuple[Path, Path]) -> None:
    assert cuda_devices({}, *machine) == 0
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "0"}, *machine) == 0


def test_device_files_count_before_what_proc_shows(machine: tuple[Path, Path]) -> None:
    for bus in ("0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"):
        (machine[0] / bus).mkdir(parents=True)
    assert cuda_devices({}, *machine) == 3
    (machine[1] / "nvidia2").touch()  # a container that was given the third of the machine's devices
    assert cuda_devices({}, *machine) == 1


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2, 0", 2),
        ("0,1,-1,2", 2),
        ("0,9,1", 1),
        ("1,1", 0),
        ("NoDevFiles", 0),
        ("GPU-8932f937,GPU-4321abcd", 2),
        ("MIG-1,MIG-2", 1),
        ("0,1,2,3,4,5", 4),
    ],
)
def test_only_visible_devices_count(machine: tuple[Path, Path], visible: str, count: int) -> None:
    four(machine)
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": visible}, *machine) == count


@pytest.mark.parametrize(
    ("settings", "found", "count"),
    [
        (WorkerSettings(), 0, 1),
        (WorkerSettings(), 4, 4),
        (WorkerSettings(), 100, 64),
        (WorkerSettings(device="cuda"), 4, 4),
        (WorkerSettings(device="cuda:1"), 4, 1),
        (WorkerSettings(device="cpu"), 4, 1),
        (WorkerSettings(device="cpu", count=2), 0, 2),
        (WorkerSettings(count=2), 4, 2),
    ],
)
def test_one_worker_per_device_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, settings: WorkerSettings, found: int, count: int
) -> None:
    monkeypatch.setattr(devices, "cuda_devices", lambda _environ: found)
    assert worker_count(settings, {}) == count
