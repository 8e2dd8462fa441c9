import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Conflict, UnknownModel, UnknownVersion
from shared.repository import Meta, Repository, RepositoryError, Traffic, digest_of
from shared.repository_lock import bytes_in
from shared.repository_writer import (
    Removed,
    add_version,
    change_traffic,
    remove_version,
    role_of,
    set_current,
    sweep,
    write_atomically,
)
from shared.traffic import Canary, Why, roll_back, start_canary, switch
from tests.support.stack import ROOT

CHILD_LIMIT_S = 60
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
    with pytest.raises(RepositoryError, match=r"w: can't be stored: No space left"):
        add_version(root, "m", files, META)
    assert list((root / "m" / "versions").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs to mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_and_nothing_is_half_written(
    small_disk: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    root = small_disk / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "model.yaml").write_text(CONFIG)
    old = add_version(root, "m", files, META)
    before = sorted(path for path in root.rglob("*"))
    traffic = (root / "m" / "traffic.json").read_bytes()
    large = tmp_path / "large"
    large.write_bytes(b"x" * 1024 * 1024)
    for _ in range(2):
        with pytest.raises(RepositoryError) as caught:
            add_version(root, "m", {"large.bin": large}, META, make_current=True)
        assert caught.value.text == "large: can't be stored: No space left on device (nothing was changed)"
    assert sorted(path for path in root.rglob("*")) == before
    assert (root / "m" / "traffic.json").read_bytes() == traffic
    Repository.verify(Repository(root).open("m", old.version))


def test_a_full_disk_does_not_spoil_traffic(small_disk: Path, files: dict[str, Path]) -> None:
    root = small_disk / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "model.yaml").write_text(CONFIG)
    first = add_version(root, "m", files, META)
    files["weights.bin"].write_bytes(b"second")
    second = add_version(root, "m", files, META)
    fill(small_disk / "rest")
    with pytest.raises(RepositoryError, match="m: can't be written: No space left on device"):
        set_current(root, "m", second.version)
    assert Repository(root).current("m") == first.version
    assert hidden(root) == []
    (small_disk / "rest").unlink()
    assert set_current(root, "m", second.version).current == second.version


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        file.writelines(iter(lambda: b"x" * 4096, b""))


def test_a_file_that_grows_too_large_is_told(root: Path, files: dict[str, Path]) -> None:
    """What the system refuses in the middle of a file, in a process of its own."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "add_version(root, 'm', {'w': Path(sys.argv[2])}, Meta())"
    )
    with child(root, code, files["weights.bin"]) as process:
        _, err = process.communicate(timeout=CHILD_LIMIT_S)
    assert "RepositoryError: w: can't be stored: File too large (nothing was changed)" in err
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
    assert hidden(root) == [], "the next writer sweeps what a crash left"


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "m").rglob(".*"))


def child(root: Path, code: str, *arguments: Path) -> subprocess.Popen[str]:
    """A process of its own that writes."""
    start = (
        "import sys, os; from pathlib import Path; from shared import repository_writer as writer; "
        "from shared.repository import Meta; from shared.repository_writer import *; root = Path(sys.argv[1])\n"
    )
    argv = [sys.executable, "-c", start + code, str(root), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


HALFWAY = """
opened = writer.open_plain
class Halfway:
    def __init__(self, file):
        self.file, self.reads = file, 0
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()
    def read(self, _):
        self.reads += 1
        if self.reads == 2:
            print("halfway", flush=True)
            sys.stdin.readline()
        return self.file.read(1000)
def open_plain(path):
    writer.open_plain = lambda path: Halfway(opened(path))
    return opened(path)
writer.open_plain = open_plain
print(add_version(root, "m", {"w": Path(sys.argv[2])}, Meta()).version, flush=True)
"""
"""An add that stops in the middle of copying its file, and goes on when it gets a line."""


def test_a_writer_killed_while_it_copies_leaves_nothing_that_counts(root: Path, files: dict[str, Path]) -> None:
    old = add_version(root, "m", {"w": files["deep/labels.txt"]}, META)
    with child(root, HALFWAY, files["weights.bin"]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "halfway\n"
        half = [path for path in (root / "m" / "versions").rglob(".new-*/w") if path.stat().st_size == 0]
        assert half, "nothing of it has reached the disk, or a whole buffer of it"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert Repository(root).versions("m") == [old.version]
    assert len(hidden(root)) == 1
    new = add_version(root, "m", {"w": files["weights.bin"]}, META)
    Repository.verify(new)
    assert hidden(root) == []


def test_while_one_copies_others_write_and_do_not_sweep_it_away(root: Path, files: dict[str, Path]) -> None:
    old = add_version(root, "m", {"w": files["deep/labels.txt"]}, META)
    with child(root, HALFWAY, files["weights.bin"]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "halfway\n"
        other = add_version(root, "m", files, META)
        assert set_current(root, "m", other.version).current == other.version
        assert sweep(root, "m") == 0
        assert len(hidden(root)) == 1
        out, err = process.communicate("go on\n", timeout=CHILD_LIMIT_S)
    assert process.returncode == 0, err
    assert sorted(Repository(root).versions("m")) == sorted([old.version, other.version, out.strip()])
    assert hidden(root) == []


@pytest.mark.parametrize("same", [True, False])
def test_two_at_once_both_end_well(root: Path, files: dict[str, Path], same: bool) -> None:
    second = files["weights.bin"] if same else files["deep/labels.txt"]
    with child(root, HALFWAY, files["weights.bin"]) as one, child(root, HALFWAY, second) as two:
        for process in (one, two):
            assert process.stdout is not None
            assert process.stdout.readline() == "halfway\n"
        versions = []
        for process in (one, two):
            out, err = process.communicate("go on\n", timeout=CHILD_LIMIT_S)
            assert process.returncode == 0, err
            versions.append(out.strip())
    repository = Repository(root)
    assert repository.versions("m") == sorted(set(versions))
    assert len(set(versions)) == (1 if same else 2)
    for version in versions:
        repository.verify(repository.open("m", version))
    assert [change["to"] for change in repository.traffic("m").history] == [versions[0]], "the first is current"
    assert hidden(root) == []


def test_a_lock_that_is_never_given_up_is_told(
    root: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = "from shared.repository_lock import locked\nwith locked(root / 'm'): print('held', flush=True); input()"
    monkeypatch.setattr("shared.repository_lock.LOCK_LIMIT_S", 0.05)
    with child(root, hold) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RepositoryError, match="model m: another process has been writing"):
            add_version(root, "m", files, META)
        process.communicate("\n", timeout=CHILD_LIMIT_S)
    add_version(root, "m", files, META)


def test_links_are_not_followed(root: Path, files: dict[str, Path], tmp_path: Path) -> None:
    link, hard = tmp_path / "link", tmp_path / "hard"
    link.symlink_to(files["weights.bin"])
    with pytest.raises(RepositoryError, match="link: is a link"):
        add_version(root, "m", {"w": link}, META)
    hard.hardlink_to(files["weights.bin"])
    with pytest.raises(RepositoryError, match="hard links"):
        add_version(root, "m", {"w": hard}, META)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RepositoryError, match="no plain file"):
        add_version(root, "m", {"w": tmp_path / "fifo"}, META)


def test_a_source_that_changes_while_it_is_copied_is_told(
    root: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.repository_writer._plain_digest", lambda _path: "0" * 64)
    with pytest.raises(RepositoryError, match="changed while it was copied"):
        add_version(root, "m", files, META)
    assert list((root / "m" / "versions").iterdir()) == []


def test_what_has_no_meta_file_gives_way_to_the_version(root: Path, files: dict[str, Path]) -> None:
    version = add_version(root, "m", files, META)
    (version.files / "meta.json").unlink()
    assert Repository(root).versions("m") == []
    Repository.verify(add_version(root, "m", files, META))


def test_a_second_version_leaves_the_only_one_current(root: Path, files: dict[str, Path]) -> None:
    first = add_version(root, "m", files, META)
    (root / "m" / "traffic.json").unlink()
    add_version(root, "m", {"w": files["weights.bin"]}, META)
    assert Repository(root).current("m") == first.version


@pytest.fixture
def three(root: Path, files: dict[str, Path]) -> list[str]:
    """The first is current."""
    versions = []
    for number in range(3):
        files["weights.bin"].write_bytes(b"weights %d" % number)
        versions.append(add_version(root, "m", files, META).version)
    return versions


def test_a_version_that_nothing_needs_is_removed(root: Path, three: list[str]) -> None:
    path = root / "m" / "versions" / three[1]
    nbytes = bytes_in(path)
    assert remove_version(root, "m", three[1]) == Removed("m", three[1], nbytes)
    assert Repository(root).versions("m") == sorted([three[0], three[2]])
    assert sorted(entry.name for entry in path.parent.iterdir()) == sorted([three[0], three[2]])


def test_a_version_in_use_is_not_removed(root: Path, three: list[str]) -> None:
    why = Why("now", "test")
    set_current(root, "m", three[1])
    for shadow, role in ((False, "canary"), (True, "shadow")):
        canary = Canary(version=three[2], percent=5, shadow=shadow)
        change_traffic(root, "m", lambda before, canary=canary: start_canary(before, canary, why))
        for version, used_as in zip(three, ("standby", "current", role), strict=True):
            assert role_of(Repository(root).traffic("m"), version) == used_as
            with pytest.raises(Conflict, match=rf"in use \({used_as}\)"):
                remove_version(root, "m", version)
    assert len(Repository(root).versions("m")) == 3


@pytest.fixture
def others_write_while_it_deletes(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been deleted so far, each while another writer had its turn."""
    monkeypatch.setattr("shared.repository_lock.LOCK_LIMIT_S", 0.2)
    rmtree, deleted = shutil.rmtree, []

    def deleting(path: Path, *, ignore_errors: bool) -> None:
        change_traffic(root, "m", lambda before: before)
        deleted.append(path.name.partition("-")[0])
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", deleting)
    return deleted


def test_nobody_waits_for_a_version_to_be_deleted(
    root: Path, three: list[str], others_write_while_it_deletes: list[str]
) -> None:
    remove_version(root, "m", three[2])
    assert others_write_while_it_deletes == [".old"]
    assert hidden(root) == []


def test_nobody_waits_for_what_a_crash_left_and_a_rollback_deletes_none_of_it(
    root: Path, files: dict[str, Path], three: list[str], others_write_while_it_deletes: list[str]
) -> None:
    for left in (".new-0123-4567", ".old-0123-4567"):
        (root / "m" / "versions" / left / "deep").mkdir(parents=True)
    set_current(root, "m", three[1])
    assert (others_write_while_it_deletes, len(hidden(root))) == ([], 2)
    files["weights.bin"].write_bytes(b"more")
    add_version(root, "m", files, META)
    assert sorted(others_write_while_it_deletes[:2]) == [".new", ".old"]
    assert hidden(root) == []


def test_what_is_being_deleted_is_nobody_elses_to_delete(
    root: Path, three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree, swept = shutil.rmtree, []

    def deleting(path: Path, *, ignore_errors: bool) -> None:
        swept.append(sweep(root, "m"))
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", deleting)
    remove_version(root, "m", three[2])
    assert swept == [0]


def test_a_version_that_has_been_removed_gets_no_traffic(root: Path, three: list[str]) -> None:
    why = Why("now", "test")
    remove_version(root, "m", three[2])
    before = (root / "m" / "traffic.json").read_bytes()
    canary = Canary(version=three[2], percent=5)
    for change in (
        lambda before: switch(before, three[2], why),
        lambda before: start_canary(before, canary, why),
    ):
        with pytest.raises(UnknownVersion, match=f"no version '{three[2]}': it has been removed"):
            change_traffic(root, "m", change)
    assert (root / "m" / "traffic.json").read_bytes() == before


def test_a_standby_that_somebody_has_deleted_keeps_nobody_from_ending_a_canary(root: Path, three: list[str]) -> None:
    why = Why("now", "test")
    set_current(root, "m", three[1])
    change_traffic(root, "m", lambda before: start_canary(before, Canary(version=three[2], percent=5), why))
    shutil.rmtree(root / "m" / "versions" / three[0])
    assert change_traffic(root, "m", lambda before: roll_back(before, why)).canary is None
    with pytest.raises(UnknownVersion, match="it has been removed"):
        change_traffic(root, "m", lambda before: roll_back(before, why))


def test_what_else_is_not_removed(root: Path, three: list[str]) -> None:
    with pytest.raises(Conflict, match="in use by the running server"):
        remove_version(root, "m", three[2], unless=lambda: {three[2]})
    with pytest.raises(UnknownVersion):
        remove_version(root, "m", "../..")
    with pytest.raises(UnknownModel):
        remove_version(root, "n", three[2])
    for version in three[1:]:
        remove_version(root, "m", version)
    (root / "m" / "traffic.json").unlink()
    with pytest.raises(Conflict, match="in use"):
        remove_version(root, "m", three[0])


def test_a_crash_while_a_version_is_removed_leaves_all_or_nothing(
    root: Path, three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = 0
    for step in range(10):
        with monkeypatch.context() as patch:
            _crash_at(patch, step)
            patch.setattr(shutil, "rmtree", _crash)
            try:
                remove_version(root, "m", three[2])
            except Crash:
                crashed += 1
        repository = Repository(root)
        for version in repository.versions("m"):
            repository.verify(repository.open("m", version))
        if three[2] not in repository.versions("m"):
            break
    assert crashed >= 2
    left = (root / "m" / "versions").glob(".old-*")
    assert sum(bytes_in(path) for path in left) == sweep(root, "m", dry_run=True) == sweep(root, "m") > 0
    assert hidden(root) == []


def _crash(*_: object, **__: object) -> None:
    raise Crash


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
