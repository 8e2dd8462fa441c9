import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import StartupError
from shared.pipeline import PipelineSpec
from shared.tensors import TensorSpec
from tests.support.worker_parts import toy_model
from workers.backends.simulated import SimulatedRunner, Timing, load, row_digests

SPEC = PipelineSpec(
    kind="image",
    inputs=(TensorSpec(name="image", datatype="UINT8", shape=(5, 5, 3)),),
    outputs=(
        TensorSpec(name="scores", datatype="FP32", shape=(10,)),
        TensorSpec(name="classes", datatype="INT32", shape=(10,), maximum=1000),
        TensorSpec(name="flag", datatype="BOOL", shape=()),
        TensorSpec(name="free", datatype="INT64", shape=(-1, 2)),
    ),
)
MODEL_YAML = "pipeline: toy:Toy\nbackend: simulated\n"


def rows(count: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    return np.random.default_rng(seed).integers(0, 256, (count, 5, 5, 3)).astype(np.uint8)


def runner(a_ms: float = 0.0, b_ms: float = 0.0) -> SimulatedRunner:
    return SimulatedRunner(SPEC, Timing(a_ms, b_ms))


def test_outputs_are_what_the_pipeline_declares() -> None:
    scores, classes, flag, free = runner().run([[rows(3, 1)], [rows(2, 2)]], 8, "fp32").outputs
    assert [(output.shape, str(output.dtype)) for output in (scores, classes, flag, free)] == [
        ((5, 10), "float32"),
        ((5, 10), "int32"),
        ((5,), "bool"),
        ((5, 1, 2), "int64"),
    ]
    assert (np.diff(scores.astype(float), axis=1) < 0).all()
    assert 0 <= float(scores.min()) <= float(scores.max()) <= 1
    assert 0 <= int(classes.min()) <= int(classes.max()) < 1000
    assert all(len(set(row)) == 10 for row in classes.tolist())


@given(st.integers(0, 1000), st.integers(1, 6))
def test_a_row_is_answered_alike_alone_and_in_company(seed: int, count: int) -> None:
    batch = rows(count, seed)
    together = runner().run([[batch]], count, "fp32").outputs
    alone = [runner().run([[batch[row : row + 1]]], 1, "fp32").outputs for row in range(count)]
    for number, output in enumerate(together):
        np.testing.assert_array_equal(output, np.concatenate([single[number] for single in alone]))


@given(st.integers(0, 74), st.integers(1, 255))
def test_a_changed_byte_changes_the_answer(place: int, by: int) -> None:
    one = rows(1, 0)
    other = one.copy()
    other.reshape(-1)[place] ^= np.uint8(by)
    first, second = (runner().run([[batch]], 1, "fp32").outputs for batch in (one, other))
    assert first[0].tolist() != second[0].tolist() or first[1].tolist() != second[1].tolist()


def test_swapped_words_and_swapped_inputs_differ() -> None:
    one = np.arange(4, dtype=np.uint64).reshape(1, 4)
    other = one[:, ::-1].copy()
    assert row_digests([one]) != row_digests([other])
    assert row_digests([one, other]) != row_digests([other, one])


def test_a_batch_takes_a_plus_b_per_row() -> None:
    forward = runner(a_ms=4.0, b_ms=1.0).run([[rows(6, 0)]], 8, "fp32")
    assert forward.copy_s + forward.run_s >= 0.010
    assert forward.finite.all()


def test_it_loads_from_its_version(tmp_path: Path) -> None:
    version = toy_model(tmp_path, "toy", MODEL_YAML, {"simulated.json": json.dumps({"a_ms": 1, "b_ms": 0}).encode()})
    assert load(version, SPEC)._timing == Timing(1, 0)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"other.json": b"{}"}, "has no simulated.json"),
        ({"simulated.json": b'{"a_ms": -1, "b_ms": 0}'}, "a_ms"),
        ({"simulated.json": b'{"a_ms": 1, "b_ms": 0, "c": 1}'}, "c"),
        ({"simulated.json": b"{"}, "simulated.json"),
    ],
)
def test_a_bad_version_is_named(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    version = toy_model(tmp_path, "toy", MODEL_YAML, files)
    with pytest.raises(StartupError) as caught:
        load(version, SPEC)
    assert "toy" in caught.value.text
    assert words in caught.value.text
    assert str(tmp_path) not in caught.value.text


def test_the_worker_with_simulated_models_only_never_imports_torch(tmp_path: Path) -> None:
    toy_model(tmp_path, "toy", MODEL_YAML, {"simulated.json": b'{"a_ms": 0, "b_ms": 0}'})
    probe = (
        "import sys; from pathlib import Path; import workers.__main__ as main; from shared.settings import Settings;"
        "from workers import loading; settings = Settings(repository=Path(sys.argv[1]));"
        "device = main._device(settings, 0); loader = loading.Loader(settings, device);"
        "loaded = [loader.load(*wanted) for wanted in loading.served(settings)];"
        "print(device.name, len(loaded), 'torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", probe, str(tmp_path)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines()[-1].split() == ["simulated", "1", "False"]
