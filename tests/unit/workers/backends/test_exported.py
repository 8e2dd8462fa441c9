import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shared.errors import StartupError
from shared.settings import BatchingSettings, Settings
from tests.support.worker_parts import toy_model
from workers.backends import archive, torch_device
from workers.backends.archive import Declared
from workers.backends.base import LoadFailed
from workers.loading import Loader
from workers.model_pool import Key, LoadedVersion

YAML = "pipeline: toy:Toy\nbackend: torch\ntrust: code\n"
GRAPH = "models/model.json"
Entries = dict[str, bytes]


class Network(nn.Module):
    """Has a batch norm, a constant and shapes that are computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).reshape(x.shape[0] * 2, -1).reshape(x.shape[0], 4) + self.table


def exported(*, dynamic: bool = True) -> bytes:
    shapes = ({0: torch.export.Dim("rows")},) if dynamic else None
    program = torch.export.export(Network().eval(), (torch.zeros(2, 4),), dynamic_shapes=shapes)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def good() -> bytes:
    return exported()


def entries_of(content: bytes) -> Entries:
    """By their names below the archive's folder."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {info.filename.partition("/")[2]: file.read(info) for info in file.infolist()}


def packed(entries: Entries, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(f"m/{name}", content)
    return buffer.getvalue()


def ready(root: Path, content: bytes, yaml: str = YAML, name: str = "m.pt2") -> LoadedVersion:
    version = toy_model(root, "toy", yaml, {name: content}, "def network():\n    raise SystemExit\n")
    settings = Settings(repository=root, batching=BatchingSettings(max_rows=4, sizes=(1, 2, 4)))
    return Loader(settings, torch_device.find("cpu", 0, 1)).load(Key("toy", version.version))


def refused(root: Path, content: bytes, yaml: str = YAML) -> str:
    with pytest.raises(StartupError) as caught:
        ready(root, content, yaml)
    text = caught.value.text
    assert str(root) not in text
    assert "\n" not in text
    return text


def test_an_archive_is_a_network_without_code(tmp_path: Path, good: bytes) -> None:
    loaded = ready(tmp_path, good)
    rows = np.random.default_rng(0).random((3, 4), np.float32)
    with torch.inference_mode():
        expected = Network().eval()(torch.from_numpy(rows)).numpy()
    forward = loaded.runner.run([[rows[:1]], [rows[1:]]], 4, "fp32")
    np.testing.assert_allclose(forward.outputs[0], expected, rtol=1e-4, atol=1e-6)
    assert loaded.runner.memory_bytes >= 4 * (4 * 8 + 8 + 8 * 4 + 4)


def test_what_it_declares_is_read_without_torch(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "m.pt2").write_bytes(good)
    found = archive.check(tmp_path / "m.pt2", "m")
    assert found.inputs == (Declared("x", "FP32", (-1, 4)),)
    assert [(each.datatype, each.shape) for each in found.outputs] == [("FP32", (-1, 4))]


def test_shapes_that_are_computed_are_plain_arithmetic(tmp_path: Path) -> None:
    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3, padding=1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(self.layers(x), scale_factor=1.5).flatten(2).mean(2) + x.shape[2] // 3 % 2

    sizes = {0: torch.export.Dim("rows"), 2: torch.export.Dim("height", min=16, max=4096), 3: torch.export.Dim.AUTO}
    program = torch.export.export(Pictures().eval(), (torch.zeros(2, 3, 64, 48),), dynamic_shapes=(sizes,))
    torch.export.save(program, tmp_path / "m.pt2")
    assert b"FloorDiv" in entries_of((tmp_path / "m.pt2").read_bytes())[GRAPH]
    assert archive.check(tmp_path / "m.pt2", "m").inputs[0].shape == (-1, 3, -1, -1)


@pytest.mark.parametrize("yaml", ["network: mine:network\n", "network: mine:network\ntrust: data\n"])
def test_without_trust_it_is_not_opened(tmp_path: Path, good: bytes, yaml: str) -> None:
    text = refused(tmp_path, good, "pipeline: toy:Toy\n" + yaml)
    assert "m.pt2: a torch.export archive may run code as it is loaded; set `trust: code` in model.yaml" in text


def test_without_trust_and_network_model_yaml_says_what_is_missing(tmp_path: Path, good: bytes) -> None:
    text = refused(tmp_path, good, "pipeline: toy:Toy\n")
    assert "network is required when backend is torch" in text
    assert "only a torch.export archive needs none, and `trust: code`" in text


def test_a_fixed_batch_is_named(tmp_path: Path) -> None:
    text = refused(tmp_path, exported(dynamic=False))
    assert "model toy: m.pt2: runs batches of 2 row(s), and none of 1: export it with a dynamic first dimension" in text
    assert 'torch.export.Dim("rows")' in text


def test_an_archive_that_the_pipeline_does_not_fit_is_named(tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(5, 4), (torch.zeros(2, 5),), dynamic_shapes=({0: torch.export.Dim("n")},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    assert "m.pt2: can't run what the pipeline makes (RuntimeError, see the log)" in refused(
        tmp_path, buffer.getvalue()
    )


def test_a_network_and_an_archive_do_not_go_together(tmp_path: Path, good: bytes) -> None:
    text = refused(tmp_path, good, YAML + "network: mine:network\n")
    assert "must have one .safetensors file, has 0 and m.pt2" in text


# ------------------------------------------------------------------ what could run code

MARK = "mark-of-a-canary"


class Canary:
    """Its unpickling leaves a mark in the working folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(MARK),))


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _edited(entries: Entries, name: str, change: Callable[[Any], None]) -> Entries:
    found = json.loads(entries[name])
    change(found)
    return {**entries, name: json.dumps(found).encode()}


def _first_node(graph: Any) -> Any:  # noqa: ANN401 - JSON
    return graph["graph_module"]["graph"]["nodes"][0]


def _pickled_inputs(entries: Entries) -> Entries:
    return {**entries, "data/sample_inputs/model.pt": _saved(((Canary(),), {}))}


def _pickled_weight(entries: Entries) -> Entries:
    def change(config: Any) -> None:  # noqa: ANN401 - JSON
        next(iter(config["config"].values()))["use_pickle"] = True

    name = "data/weights/model_weights_config.json"
    return {**_edited(entries, name, change), "data/weights/weight_0": _saved(Canary())}


def _custom_object(entries: Entries) -> Entries:
    def change(config: Any) -> None:  # noqa: ANN401 - JSON
        config["config"]["c"] = {
            "path_name": "opaque_obj_0",
            "is_param": False,
            "use_pickle": True,
            "tensor_meta": None,
        }

    name = "data/constants/model_constants_config.json"
    return {**_edited(entries, name, change), "data/constants/opaque_obj_0": pickle.dumps(Canary())}


def _custom_object_by_another_name(entries: Entries) -> Entries:
    def change(config: Any) -> None:  # noqa: ANN401 - JSON
        config["config"]["c"] = {
            "path_name": "opaque_obj_0",
            "is_param": False,
            "use_pickle": False,
            "tensor_meta": None,
        }

    return _edited(entries, "data/constants/model_constants_config.json", change)


def _old_weights(entries: Entries) -> Entries:
    return {**entries, "data/weights/model.pt": _saved(Canary())}


def _old_format(_: Entries) -> Entries:
    return {"version": b"8.20", "serialized_state_dict.pt": _saved(Canary())}


def _library(entries: Entries) -> Entries:
    return {**entries, "data/aotinductor/model/x.so": b"\x7fELF"}


def _function_by_name(entries: Entries) -> Entries:
    return _edited(entries, GRAPH, lambda graph: _first_node(graph).update(target="torch.os.mkdir"))


def _operator_of_python(entries: Entries) -> Entries:
    return _edited(entries, GRAPH, lambda graph: _first_node(graph).update(target="_operator.methodcaller"))


def _shape_that_is_source(entries: Entries) -> Entries:
    text = entries[GRAPH].decode()
    symbol = text[text.index("Symbol(") :].partition('"')[0]
    return {**entries, GRAPH: text.replace(symbol, f"__import__('pathlib').Path('{MARK}').touch()", 1).encode()}


def _second_entry(entries: Entries) -> Entries:
    return {**entries, "DATA/weights/weight_0": b"x"}


BAD = {
    _pickled_inputs: "its example inputs are no plain tensors",
    _pickled_weight: "is a pickled object: export the network with plain tensors only",
    _custom_object: "holds 'data/constants/opaque_obj_0', which is neither the graph nor a plain tensor",
    _custom_object_by_another_name: "'c' is a pickled object",
    _old_weights: "holds 'data/weights/model.pt', which is neither",
    _old_format: "holds 'serialized_state_dict.pt', which is neither",
    _library: "holds 'data/aotinductor/model/x.so', which is neither",
    _function_by_name: "calls 'torch.os.mkdir', which is none of torch's operators",
    _operator_of_python: "calls '_operator.methodcaller', which is none of torch's operators",
    _shape_that_is_source: "has a shape that is no plain expression",
    _second_entry: "is not laid out as torch.export.save does it",
}


@pytest.mark.parametrize("damage", BAD, ids=lambda damage: damage.__name__.strip("_"))
def test_what_could_run_code_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: bytes, damage: Callable[[Entries], Entries]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = refused(tmp_path / "models", packed(damage(entries_of(good))))
    assert BAD[damage] in text
    assert not (tmp_path / MARK).exists()


def test_guards_are_source_text_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: bytes) -> None:
    def change(graph: Any) -> None:  # noqa: ANN401 - JSON
        graph["guards_code"] = [f"__import__('pathlib').Path('{MARK}').touch() is None"]

    monkeypatch.chdir(tmp_path)
    ready(tmp_path / "models", packed(_edited(entries_of(good), GRAPH, change)))
    assert not (tmp_path / MARK).exists()


def test_a_good_archive_survives_being_packed_anew(tmp_path: Path, good: bytes) -> None:
    """So that the damage above, and not the packing, is what is refused."""
    ready(tmp_path, packed(entries_of(good)))


def test_a_compressed_archive_is_refused(tmp_path: Path, good: bytes) -> None:
    assert "not laid out as" in refused(tmp_path, packed(entries_of(good), zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", pickle.dumps(Canary()), packed({}), packed({GRAPH: b"[]"})])
def test_what_is_no_archive_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    assert "m.pt2: is no torch.export archive" in refused(tmp_path / "models", content)
    assert not (tmp_path / MARK).exists()


def test_damaged_graphs_raise_nothing_else(tmp_path: Path, good: bytes) -> None:
    entries = entries_of(good)
    path = tmp_path / "m.pt2"
    for cut in range(0, len(entries[GRAPH]), 97):
        path.write_bytes(packed({**entries, GRAPH: entries[GRAPH][:cut]}))
        with pytest.raises(LoadFailed):
            archive.check(path, "m")
    for key in json.loads(entries[GRAPH])["graph_module"]:
        path.write_bytes(packed(_edited(entries, GRAPH, lambda graph, key=key: graph["graph_module"].pop(key))))
        try:
            archive.check(path, "m")
        except LoadFailed:
            continue
