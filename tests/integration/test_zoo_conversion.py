"""The one place that opens foreign formats: weights are taken out, code never runs. Real pip looks into our folder."""

import io
import json
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from headrace.zoo_packages import Package, download
from headrace.zoo_text import _toxic_tensors
from headrace.zoo_weights import needed, save_lines, save_tensors, state_dict_of
from shared.errors import ExitCode, StartupError
from tests.support.zoo_parts import digest, source_package
from workers.networks.toxic_comment import toxic_comment

Numbers = npt.NDArray[np.float64]


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_tensors_keep_names_and_values_and_the_bytes_repeat(tmp_path: Path) -> None:
    state = {"b.weight": torch.arange(6.0).reshape(2, 3).T, "a": torch.tensor(7)}
    for name in ("one", "two"):
        assert save_tensors(state_dict_of(_saved(state)), tmp_path / name) == tmp_path / name
    loaded = load_file(tmp_path / "one")
    assert set(loaded) == set(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


class _Touch:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("form", ["archive", "bare"])
def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path: Path, form: str) -> None:
    canary = tmp_path / "canary"
    by_hand = f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode()  # what a pickle of os.system(...) looks like
    raw = _saved({"a": _Touch(canary)}) if form == "archive" else by_hand
    with pytest.raises(Exception, match="Weights only load failed"):
        state_dict_of(raw)
    assert not canary.exists()


def test_lines_end_with_one_newline_each(tmp_path: Path) -> None:
    assert save_lines(["a", "b\u2028c"], tmp_path / "labels").read_bytes() == "a\nb\u2028c\n".encode()


def test_a_missing_extra_is_named_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(StartupError, match=r"needs h5py: install it with `pip install 'headrace\[zoo\]'`") as caught:
        needed("h5py")
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS


def _sigmoid(x: Numbers) -> Numbers:
    return np.asarray(1 / (1 + np.exp(-x)))


def _keras_lstm(inputs: Numbers, kernel: Numbers, recurrent: Numbers, bias: Numbers) -> Numbers:
    """Gates in the order i, f, c, o, as Keras has them."""
    hidden = cell = np.zeros(len(recurrent))
    states = []
    for row in inputs:
        gate_in, forget, candidate, out = np.split(row @ kernel + hidden @ recurrent + bias, 4)
        cell = _sigmoid(forget) * cell + _sigmoid(gate_in) * np.tanh(candidate)
        hidden = _sigmoid(out) * np.tanh(cell)
        states.append(hidden)
    return np.array(states)


def test_keras_layers_become_torchs(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    shapes = {
        "embedding/vars/0": (20000, 50),
        **{
            f"bidirectional/{way}_layer/cell/vars/{number}": shape
            for way in ("forward", "backward")
            for number, shape in enumerate([(50, 200), (50, 200), (200,)])
        },
        "dense/vars/0": (100, 50),
        "dense/vars/1": (50,),
        "dense_1/vars/0": (50, 6),
        "dense_1/vars/1": (6,),
    }
    values = {name: random.normal(size=shape, scale=0.3).astype("f4") for name, shape in shapes.items()}
    with h5py.File(tmp_path / "w.h5", "w") as file:
        for name, value in values.items():
            file[f"layers/{name}"] = value
    network = toxic_comment().eval()
    network.load_state_dict(_toxic_tensors((tmp_path / "w.h5").read_bytes()))
    ids = [0] * 97 + [5, 17, 19_999]
    rows = values["embedding/vars/0"][ids]
    ways = [
        [values[f"bidirectional/{way}_layer/cell/vars/{number}"] for number in range(3)]
        for way in ("forward", "backward")
    ]
    both = np.concatenate([_keras_lstm(rows, *ways[0]), _keras_lstm(rows[::-1], *ways[1])[::-1]], axis=1).max(0)
    inner = np.maximum(both @ values["dense/vars/0"] + values["dense/vars/1"], 0)
    expected = inner @ values["dense_1/vars/0"] + values["dense_1/vars/1"]
    with torch.inference_mode():
        np.testing.assert_allclose(network(torch.tensor([ids]))[0].numpy(), expected, atol=1e-4)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the real pip is configured to look into, and nowhere else."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_real_pip_brings_a_wheel(registry: Path, tmp_path: Path) -> None:
    path = registry / "weights_of_mine-1.0-py3-none-any.whl"
    info = "weights_of_mine-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights_of_mine/w.json", json.dumps([1]))
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: weights-of-mine\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    package = Package("weights-of-mine", "1.0", digest(path), path.name)
    assert digest(download(package, tmp_path / "cache")) == package.sha256
    with pytest.raises(StartupError, match=r"can't fetch weights-of-mine==1\.1: .*No matching distribution"):
        download(Package("weights-of-mine", "1.1", digest(path), path.name), tmp_path / "other")


def test_real_pip_brings_a_source_package_and_runs_nothing_of_it(registry: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    script = f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n".encode()
    package = source_package(registry, "mine", {"setup.py": script, "mine/w": b"weights"})
    assert digest(download(package, tmp_path / "cache")) == package.sha256
    assert not canary.exists()
    missing = Package("mine", "2.0", "0" * 64, "mine-2.0.tar.gz")
    with pytest.raises(StartupError, match=r"can't fetch mine==2\.0: LookupError: no index or folder .* has mine-2\.0"):
        download(missing, tmp_path / "cache")
