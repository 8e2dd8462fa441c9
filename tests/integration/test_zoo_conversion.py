"""The one place that opens a foreign pickle: weights are taken out, code never runs."""

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.zoo import _to_safetensors


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_tensors_keep_names_and_values_and_the_bytes_repeat(tmp_path: Path) -> None:
    state = {"b.weight": torch.arange(6.0).reshape(2, 3).T, "a": torch.tensor(7)}
    _to_safetensors(_saved(state), tmp_path / "one")
    _to_safetensors(_saved(state), tmp_path / "two")
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
        _to_safetensors(raw, tmp_path / "out")
    assert not canary.exists()
    assert not (tmp_path / "out").exists()
