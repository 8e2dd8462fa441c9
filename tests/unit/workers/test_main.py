import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared import host_memory
from shared.errors import ExitCode
from shared.messages import ProcessFailed, ToSupervisor
from shared.settings import Settings, WorkerSettings
from tests.support.worker_parts import toy_model
from workers import host
from workers.__main__ import budget_of, threads_of
from workers.backends.base import NoDevice

LOST = """
import sys
from workers import __main__ as main
from workers.backends.base import DeviceLost

def lose(self):
    raise DeviceLost("cuda:0: device-side assert triggered")

main.Worker.run = lose
main.main()
"""


def start(folder: Path, code: str, fd: int) -> "subprocess.CompletedProcess[str]":
    toy_model(
        folder / "models", "sim", "pipeline: toy:Toy\nbackend: simulated\n", {"simulated.json": b'{"a_ms":0,"b_ms":0}'}
    )
    config = folder / "headrace.yaml"
    with tempfile.TemporaryDirectory(prefix="headrace-test-") as runtime:  # the test's own folder may be too deep
        config.write_text(f"repository: models\nruntime_dir: {runtime}/run\n")
        argv = [sys.executable, "-c", code, "--config", str(config), "--ready-fd", str(fd)]
        return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60, pass_fds=(fd,))


def told(fd: int) -> list[ToSupervisor]:
    data, messages = os.read(fd, 65536), []
    while data:
        size = int.from_bytes(data[:4], "little")
        messages.append(msgspec.msgpack.decode(data[4 : 4 + size], type=ToSupervisor))
        data = data[4 + size :]
    return messages


def test_a_lost_device_ends_the_process_at_once_and_says_so(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        done = start(tmp_path, LOST, writer)
        assert done.returncode == ExitCode.DEVICE_LOST
        assert told(reader) == [
            ProcessFailed("worker-0", ExitCode.DEVICE_LOST, "cuda:0: device-side assert triggered"),
        ]
    finally:
        os.close(reader)
        os.close(writer)
    assert not list(tmp_path.glob("run/*"))


def test_bad_settings_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    config = tmp_path / "headrace.yaml"
    config.write_text("worker: {devise: cpu}\n")
    argv = [sys.executable, "-m", "workers", "--config", str(config)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.BAD_SETTINGS
    assert len(done.stderr.splitlines()) == 1
    assert "device" in done.stderr


@pytest.mark.parametrize(("threads", "count", "cores", "expected"), [(None, 2, 16, 8), (None, 4, 2, 1), (3, 2, 16, 3)])
def test_workers_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, count: int, cores: int, expected: int
) -> None:
    monkeypatch.setattr(host, "cores", lambda: cores)
    assert threads_of(Settings(worker=WorkerSettings(threads=threads, count=count))) == expected


@pytest.mark.parametrize("index", ["-1", "64", "one"])
def test_the_index_is_a_small_number(index: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workers", f"--index={index}"], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == ExitCode.BAD_SETTINGS
    assert f"must be 0..63, not '{index}'" in done.stderr


@pytest.mark.parametrize(
    ("settings", "device", "budget"),
    [
        ({"memory_budget_bytes": 7}, "cpu", 7),
        ({}, "cpu", 500),
        ({"count": 2, "device": "cpu"}, "cpu", 250),
        ({"count": 2}, "cuda:1", 500),
        ({"count": 2, "device": "cuda:0"}, "cuda:0", 250),
    ],
)
def test_the_budget_is_as_set_or_a_share_of_what_the_worker_has_for_itself(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], device: str, budget: int
) -> None:
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 1000)
    monkeypatch.setattr(NoDevice, "name", device)
    assert budget_of(Settings(worker=WorkerSettings(**settings)), NoDevice()) == budget
