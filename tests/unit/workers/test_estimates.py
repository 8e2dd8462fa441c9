from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from shared.settings import Settings
from tests.support.worker_parts import toy_model
from workers import estimates
from workers.backends.base import NoDevice
from workers.loaded import Key
from workers.loading import Loader

TORCH = "pipeline: toy:Toy\nbackend: torch\nnetwork: mine:network\n"


def test_weights_are_counted_as_they_will_lie_in_memory(tmp_path: Path) -> None:
    tensors = {
        "single": np.zeros((100, 10), np.float32),
        "half": np.zeros(1000, np.float16),
        "double": np.zeros(1000, np.float64),
        "whole": np.zeros(1000, np.int64),
        "byte": np.zeros(1000, np.uint8),
        "scalar": np.zeros((), np.float32),
    }
    version = toy_model(tmp_path, "toy", TORCH, {"w.safetensors": safetensors.numpy.save(tensors)})
    assert estimates.of(version) == int((4000 + 4000 + 4000 + 8000 + 1000 + 4) * 1.05)


def test_a_file_that_is_no_safetensors_counts_as_it_is(tmp_path: Path) -> None:
    version = toy_model(tmp_path, "toy", TORCH, {"w.safetensors": b"x" * 1000, "more.bin": b"y" * 1000})
    assert estimates.of(version) == 2100, "the load will say what is wrong"


@pytest.mark.parametrize(("added", "nbytes"), [("", 0), (', "memory_bytes": 40000000', 40_000_000)])
def test_a_simulated_model_needs_what_it_says(tmp_path: Path, added: str, nbytes: int) -> None:
    timing = f'{{"a_ms": 0, "b_ms": 0{added}}}'.encode()
    version = toy_model(tmp_path, "toy", "pipeline: toy:Toy\nbackend: simulated\n", {"simulated.json": timing})
    assert estimates.of(version) == nbytes


def test_a_load_reads_no_other_model_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds it would be most of a small load's time."""
    timing = b'{"a_ms": 0, "b_ms": 0, "memory_bytes": 7}'
    version = toy_model(tmp_path, "toy", "pipeline: toy:Toy\nbackend: simulated\n", {"simulated.json": timing})
    listed = Path.iterdir

    def list_one(path: Path) -> Iterator[Path]:
        assert path != tmp_path, "the whole repository is read"
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", list_one)
    loader = Loader(Settings(repository=tmp_path), NoDevice())
    assert loader.estimate(Key("toy", version.version, version.revision)) == 7
