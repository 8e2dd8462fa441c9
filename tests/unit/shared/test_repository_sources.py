"""What is refused before it is stored, by name and by content."""

import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from shared.errors import ExitCode
from shared.model_config import RepositoryError
from shared.repository_sources import collect, is_pickle

Write = Callable[..., Path]


class Evil:
    """Would run a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch canary",))


WEIGHTS = save({"w": np.ones((3, 2), np.float32), "none": np.zeros(0, np.int64), "b": np.zeros(5, np.int8)})
OBJECTS = [{"weights": [1.0, 2.0]}, Evil(), [Evil()], np.zeros(3), "text" * 100]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: bytes = b"data") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return write


def zipped(**members: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target.getvalue()


def test_files_and_all_that_lies_in_folders(write: Write, tmp_path: Path) -> None:
    one, two = write("out/w.safetensors", WEIGHTS), write("out/deep/labels.txt")
    write("out/.git/config")
    write("out/.DS_Store")
    three = write("card.md")
    assert collect([tmp_path / "out", three]) == {"w.safetensors": one, "deep/labels.txt": two, "card.md": three}


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "pkl", "pickle", "ckpt", "PT", "joblib"])
def test_a_pickle_by_its_name(write: Write, suffix: str) -> None:
    with pytest.raises(RepositoryError, match=r"is a pickle by its name.*save_file") as caught:
        collect([write(f"model_final_v2_new.{suffix}")])
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS


def test_external_data_of_onnx_may_be_called_bin(write: Write) -> None:
    assert len(collect([write("m.onnx"), write("m.bin")])) == 2
    with pytest.raises(RepositoryError, match="by its content"):
        collect([write("m.onnx"), write("m.bin", pickle.dumps(Evil()))])


@pytest.mark.parametrize("content", OBJECTS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_by_its_content(write: Write, content: object, protocol: int) -> None:
    with pytest.raises(RepositoryError, match="is a pickle by its content"):
        collect([write("model.safetensors", pickle.dumps(content, protocol=protocol))])


@pytest.mark.parametrize("protocol", [0, 1])
def test_an_old_pickle_that_imports_something(write: Write, protocol: int) -> None:
    with pytest.raises(RepositoryError, match="is a pickle by its content"):
        collect([write("labels.txt", pickle.dumps(Evil(), protocol=protocol) + b"more")])


def test_what_torch_save_writes_in_both_of_its_forms(write: Write) -> None:
    torch = pytest.importorskip("torch")
    for new in (True, False):
        file = io.BytesIO()
        torch.save({"w": torch.zeros(4)}, file, _use_new_zipfile_serialization=new)
        with pytest.raises(RepositoryError, match="a pickle"):
            collect([write("weights.safetensors", file.getvalue())])


@pytest.mark.parametrize(
    "members", [{"a/data.pkl": b"x"}, {"notes.txt": b"x", "weights": pickle.dumps(Evil())}, {"deep/x.pickle": b""}]
)
def test_a_pickle_inside_a_zip(write: Write, members: dict[str, bytes]) -> None:
    with pytest.raises(RepositoryError, match="holds a pickle"):
        collect([write("model.onnx", zipped(**members))])


def test_a_broken_zip_is_told(write: Write) -> None:
    with pytest.raises(RepositoryError, match="begins like a zip archive"):
        collect([write("model.dat", zipped(a=b"x")[:-10])])


def test_an_archive_of_torch_export_passes(write: Write) -> None:
    """Its example inputs are a file of torch.save inside, which is never opened."""
    torch = pytest.importorskip("torch")
    inner = io.BytesIO()
    torch.save((torch.zeros(1),), inner)
    content = zipped(**{"m/data/sample_inputs/model.pt": inner.getvalue(), "m/models/model.json": b"{}"})
    assert collect([write("model.pt2", content)])
    with pytest.raises(RepositoryError, match="holds a pickle"):
        collect([write("model.pt2", zipped(**{"m/data.pkl": b"x"}))])


@pytest.mark.parametrize(
    "text", ["cat\ndog\nbird\n", "red\namber\ngreen\n", "I\nNone\n.\n", "bus\nidle.\n", "café\n", "{}\n", "N."]
)
def test_labels_are_no_pickles(write: Write, text: str) -> None:
    assert collect([write("labels.txt", text.encode())])


@given(st.lists(st.from_regex(r"[a-zA-Z][a-zA-Z ,'-]{0,30}", fullmatch=True), min_size=1, max_size=50))
def test_no_list_of_words_is_taken_for_a_pickle(words: list[str]) -> None:
    assert not is_pickle("".join(f"{word}\n" for word in words).encode())


def test_no_length_of_a_safetensors_header_is_taken_for_a_pickle() -> None:
    for length in range(8, 2000, 8):
        plain = save({"w": np.zeros(2, np.float32)}, {"pad": "x" * length})
        assert not is_pickle(plain)
    for mark in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        (size,) = struct.unpack("<Q", mark + bytes(6))
        assert not is_pickle(struct.pack("<Q", size) + b'{"__metadata__":{}}')


@pytest.mark.parametrize("name", ["with space.txt", "ümlaut.txt", "a..b", "-dash", "meta.json", "a" * 129, "x\ny"])
def test_a_name_that_can_not_be_kept(write: Write, name: str) -> None:
    with pytest.raises(RepositoryError, match="its name can't be kept"):
        collect([write(name)])


def test_what_is_no_file(write: Write, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"there is no file .*absent"):
        collect([tmp_path / "absent"])
    (tmp_path / "none").mkdir()
    with pytest.raises(RepositoryError, match="none: holds no files"):
        collect([tmp_path / "none"])
    with pytest.raises(RepositoryError, match="is empty; was it saved to the end"):
        collect([write("w.safetensors", b"")])
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RepositoryError, match="is no plain file"):
        collect([tmp_path / "fifo"])


def test_links_are_refused_wherever_they_are(write: Write, tmp_path: Path) -> None:
    real = write("real/w.safetensors", WEIGHTS)
    for name, target in (("file", real), ("folder", real.parent), ("nowhere", tmp_path / "absent")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(RepositoryError, match=f"{name}: is a link"):
            collect([tmp_path / name])
    write("out/plain")
    (tmp_path / "out" / "inner").symlink_to(real.parent)
    with pytest.raises(RepositoryError, match="inner: is a link"):
        collect([tmp_path / "out"])
    (tmp_path / "twin").hardlink_to(real)
    with pytest.raises(RepositoryError, match="hard links"):
        collect([real])


def test_two_of_one_name(write: Write) -> None:
    with pytest.raises(RepositoryError, match="two of the files are called 'w'"):
        collect([write("a/w"), write("b/w")])


def test_a_tar_of_numbers_is_no_pickle(write: Write, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(write("numbers", bytes(range(256))), "numbers")
    assert collect([tmp_path / "x.tar"])


def test_weights_that_look_like_text_with_an_odd_escape_are_just_bytes() -> None:
    assert not is_pickle(b"S'\\\xc0'\n.")
