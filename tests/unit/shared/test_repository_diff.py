import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from shared.repository import Meta, ModelVersion, RepositoryError
from shared.repository_diff import Difference, TensorHeader, diff, read_header
from shared.repository_writer import add_version

Add = Callable[..., ModelVersion]


@pytest.fixture
def add(tmp_path: Path) -> Add:
    root = tmp_path / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "model.yaml").write_text("pipeline: tensor\nbackend: simulated\n")

    def add(meta: Meta, **files: bytes) -> ModelVersion:
        sources = {}
        for name, content in files.items():
            sources[name] = tmp_path / f"source-{name}"
            sources[name].write_bytes(content)
        return add_version(root, "m", sources, meta)

    return add


def weights(**shapes: tuple[int, ...]) -> bytes:
    return save({name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()})


def test_what_two_versions_differ_in(add: Add) -> None:
    one = add(
        Meta(
            owner="a", data_version="1", metrics={"top1": 0.5, "loss": 1.0}, hyperparameters={"lr": 0.1, "layers": [1]}
        ),
        **{"w.safetensors": weights(body=(3, 2), head=(10, 4), gone=(5,)), "labels.txt": b"a\n", "old": b"x"},
    )
    other = save({"body": np.zeros((3, 2), np.float32), "head": np.zeros((12, 4)), "new": np.zeros(1, np.int8)})
    two = add(
        Meta(
            owner="a", data_version="2", metrics={"top1": 0.6, "loss": 1.0}, hyperparameters={"lr": 0.1, "layers": [2]}
        ),
        **{"w.safetensors": other, "labels.txt": b"a\n"},
    )
    found = diff(one, two)
    told = {difference.what: (difference.before, difference.after) for difference in found.differences}
    told.pop("created", None)
    assert told.pop("files.w.safetensors") == tuple(
        {"bytes": len(content), "sha256": version.meta.files["w.safetensors"][:16]}
        for version, content in ((one, (one.files / "w.safetensors").read_bytes()), (two, other))
    )
    assert told.pop("files.old")[1] is None
    assert told == {"data_version": ("1", "2"), "metrics.top1": (0.5, 0.6), "hyperparameters.layers": ([1], [2])}
    (compared,) = found.weights
    assert compared.differences == [
        Difference("gone", "F32 [5]", None),
        Difference("head", "F32 [10, 4]", "F64 [12, 4]"),
        Difference("new", None, "I8 [1]"),
    ]
    assert (compared.same_layout, compared.unread_values) == (1, 6)


def test_a_version_and_itself(add: Add) -> None:
    version = add(Meta(), **{"w.safetensors": weights(a=(1,))})
    found = diff(version, version)
    assert (found.differences, found.weights) == ([], [])


def test_no_weights_are_read(add: Add) -> None:
    """The header is enough: the rest is cut off here."""
    one = add(Meta(), **{"w.safetensors": weights(a=(1000,))})
    two = add(Meta(), **{"w.safetensors": weights(a=(1000,))[:200]})
    assert diff(one, two).weights[0].unread_values == 1000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xff",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 200_000) + b"[" * 200_000,
    ],
)
def test_what_is_no_safetensors_file_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m" / "versions" / "0" / "w.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(RepositoryError, match=r"^m/versions/0/w.safetensors: .* no safetensors"):
        read_header(path)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_header_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    try:
        found = read_header(path)
    except RepositoryError:
        return
    assert isinstance(json.loads(content), dict)
    assert all(isinstance(header, TensorHeader) for header in found.values())
