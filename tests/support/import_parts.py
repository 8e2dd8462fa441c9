"""What the tests of `headrace models import` share: a small network as a file, and a refusal that changes nothing."""

from pathlib import Path

import pytest
from onnx import helper

from headrace.import_model import ImportOptions, run
from shared.errors import StartupError
from tests.support.onnx_parts import model, value

CLASSES = 3


def classifier(size: int = 8) -> bytes:
    """Mean of each colour, float32 [rows, 3, size, size] → [rows, 3]."""
    node = helper.make_node("ReduceMean", ["image"], ["logits"], axes=[2, 3], keepdims=0)
    found = model(
        [node],
        inputs=[value("image", shape=("n", 3, size, size))],
        outputs=[value("logits", shape=("n", CLASSES))],
    )
    return bytes(found.SerializeToString())


def refused(root: Path, file: Path, options: ImportOptions | None = None, name: str = "m") -> str:
    """The sentence; nothing may have changed."""
    before = tree(root)
    with pytest.raises(StartupError) as caught:
        run(root, name, file, options or ImportOptions())
    assert tree(root) == before
    assert "\n" not in caught.value.text
    return caught.value.text


def tree(root: Path) -> dict[str, bytes]:
    """Every file and folder below."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in sorted(root.rglob("*"))
    }


def saved(path: Path, content: bytes) -> Path:
    """A file with this content."""
    path.write_bytes(content)
    return path
