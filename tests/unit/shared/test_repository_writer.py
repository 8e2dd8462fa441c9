import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import UnknownVersion
from shared.repository import Meta, Repository, RepositoryError, Traffic, digest_of
from shared.repository_writer import add_version, set_current, write_atomically

CONFIG = "pipeline: tensor\nbackend: simulated\n"
META = Meta(source="test", licence="none", owner="me", metrics={"top1": 0.5}, hyperparameters={"epochs": 3})


class Crash(BaseException):
    """Stands for the death of the process: nothing of ours may catch it and tidy up."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "model.yaml").write_text(CONFIG)
    return root


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    weights, labels = tmp_path / "w", tmp_path / "l"
    weights.write_bytes(b"weights" * 1000)
    labels.write_text("a\nb\n")
    return {"weights.bin": weights, "deep/labels.txt": labels}


def test_a_version_is_stored_under_its_content_hash(root: Path, files: dict[str, Path]) -> None:
    version = add_version(root, "m", files, META, make_current=True, by="test")
    assert version.files == root / "m" / "versions" / version.version
    assert version.meta.digest.startswith(version.version)
    assert version.meta.metrics == {"top1": 0.5}
    assert version.meta.created.endswith("Z")
    assert set(version.meta.files) == set(files)
    assert (version.files / "deep" / "labels.txt").read_text() == "a\nb\n"
    assert stat.S_IMODE((version.files / "weights.bin").stat().st_mode) == 0o444
    Repository.verify(version)


def test_the_same_content_is_stored_once(root: Path, files: dict[str, Path]) -> None:
    first = add_version(root, "m", files, META)
    created = (first.files / "meta.json").stat().st_mtime_ns
    again = add_version(root, "m", files, Meta(source="elsewhere"))
    assert again.version == first.version
    assert again.meta.source == "test", "what is written never changes"
    assert (first.files / "meta.json").stat().st_mtime_ns == created
    assert len(Repository(root).versions("m")) == 1


def test_other_content_or_another_name_is_another_version(root: Path, files: dict[str, Path]) -> None:
    first = add_version(root, "m", files, META)
    renamed = add_version(root, "m", {"w": files["weights.bin"], "deep/labels.txt": files["deep/labels.txt"]}, META)
    files["weights.bin"].write_bytes(b"other")
    other = add_version(root, "m", files, META)
    assert len({first.version, renamed.version, other.version}) == 3


def test_the_same_content_that_rotted_is_not_taken_for_good(root: Path, files: dict[str, Path]) -> None:
    version = add_version(root, "m", files, META)
    path = version.files / "weights.bin"
    path.chmod(0o644)
    path.write_bytes(b"rotten")
    with pytest.raises(RepositoryError, match="has changed"):
        add_version(root, "m", files, META)


@pytest.mark.parametrize("name", ["../m", "", "a/b", "/m", "..", "m\x00"])
def test_a_bad_model_name_writes_nothing(root: Path, files: dict[str, Path], name: str) -> None:
    with pytest.raises(RepositoryError, match="can't be a model's name"):
        add_version(root, name, files, META)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "meta.json", "", "a//b", ".hidden", "a\\b"])
def test_a_bad_file_name_writes_nothing(root: Path, files: dict[str, Path], name: str) -> None:
    with pytest.raises(RepositoryError, match="can't be a file of a version"):
        add_version(root, "m", {name: files["weights.bin"]}, META)
    assert not (root / "m" / "versions").exists()


def test_no_files_and_no_model_are_refused(root: Path, files: dict[str, Path]) -> None:
    with pytest.raises(RepositoryError, match="at least one file"):
        add_version(root, "m", {}, META)
    with pytest.raises(RepositoryError, match=r"holds no model.yaml"):
        add_version(root, "other", files, META)


def test_a_disk_that_refuses_leaves_nothing(
    root: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RepositoryError, match="No space left"):
        add_version(root, "m", files, META)
    assert list((root / "m" / "versions").iterdir()) == []


_STEPS: list[tuple[Any, str]] = [
    (os, "fsync"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "mkdir"),
    (Path, "chmod"),
]


def _crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Callable[[], int]:
    """The `step`-th call that changes the disk, counted over all of `_STEPS`, never happens. Returns the counter."""
    calls = 0
    for owner, name in _STEPS:
        original = getattr(owner, name)

        def wrapped(*args: object, original: Callable[..., object] = original, **kwargs: object) -> object:
            nonlocal calls
            if calls == step:
                raise Crash
            calls += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)
    return lambda: calls


def test_a_crash_at_any_step_leaves_the_old_state_or_the_new(
    root: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = add_version(root, "m", files, META, make_current=True)
    files["weights.bin"].write_bytes(b"new weights")
    crashed_at = []
    for step in range(100):
        with monkeypatch.context() as patch:
            _crash_at(patch, step)
            try:
                add_version(root, "m", files, META, make_current=True)
            except Crash:
                crashed_at.append(step)
        repository = Repository(root)
        assert old.version in repository.versions("m")
        for version in repository.versions("m"):
            repository.verify(repository.open("m", version))
        assert repository.current("m") in repository.versions("m")
        if step not in crashed_at:
            break
    else:
        pytest.fail("it never got through")
    assert len(crashed_at) >= 10, "the test must have interrupted many different steps"
    assert repository.current("m") != old.version
    hidden = [path.name for path in (root / "m").rglob(".new-*")]
    assert hidden == [], "the next writer sweeps what a crash left"


def test_a_crash_while_a_file_is_replaced_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "traffic.json"
    write_atomically(path, b"old")
    for step in range(3):
        with monkeypatch.context() as patch:
            _crash_at(patch, step)
            with pytest.raises(Crash):
                write_atomically(path, b"new")
        assert path.read_bytes() in {b"old", b"new"}
    write_atomically(path, b"newest")
    assert path.read_bytes() == b"newest"


def test_traffic_keeps_the_history_of_changes(root: Path, files: dict[str, Path]) -> None:
    first = add_version(root, "m", files, META, make_current=True, by="import")
    files["weights.bin"].write_bytes(b"2")
    second = add_version(root, "m", files, META)
    assert Repository(root).current("m") == first.version
    set_current(root, "m", second.version, by="me")
    set_current(root, "m", second.version, by="me again")
    traffic = msgspec.json.decode((root / "m" / "traffic.json").read_bytes(), type=Traffic)
    assert traffic.current == second.version
    assert [(change["from"], change["to"], change["by"]) for change in traffic.history] == [
        ("", first.version, "import"),
        (first.version, second.version, "me"),
    ]


def test_current_must_be_a_version(root: Path, files: dict[str, Path]) -> None:
    add_version(root, "m", files, META)
    with pytest.raises(UnknownVersion):
        set_current(root, "m", "../../../etc")


@given(st.dictionaries(st.text(min_size=1), st.text("0123456789abcdef", min_size=64, max_size=64), min_size=1))
def test_the_digest_knows_no_order_but_every_change(files: dict[str, str]) -> None:
    digest = digest_of(files)
    assert digest_of(dict(reversed(files.items()))) == digest
    name, old = next(iter(files.items()))
    flipped = ("1" if old[0] == "0" else "0") + old[1:]
    assert digest_of({**files, name: flipped}) != digest
    assert digest_of({**files, name + "x" + "".join(files): old}) != digest
