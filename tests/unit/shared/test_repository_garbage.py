import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import Conflict, UnknownModel
from shared.repository import Meta, Repository, RepositoryError
from shared.repository_garbage import collect_garbage
from shared.repository_writer import Removed, add_version, remove_version, set_current

Run = Callable[..., list[Removed]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "model.yaml").write_text("pipeline: tensor\nbackend: simulated\n")
    return root


@pytest.fixture
def six(root: Path, tmp_path: Path) -> list[str]:
    """Versions, oldest first; the third is current, the first is the standby."""
    versions = []
    for number in range(6):
        source = tmp_path / "w"
        source.write_bytes(b"%d" % number * 1000)
        version = add_version(root, "m", {"w": source}, Meta())
        os.utime(version.files / "meta.json", ns=(number, number))  # within one second, as `created` says
        versions.append(version.version)
    set_current(root, "m", versions[2])
    return versions


def test_the_newest_and_those_in_use_stay(root: Path, six: list[str]) -> None:
    told = collect_garbage(root, "m", keep=2, dry_run=True)
    assert [found.version for found in told] == [six[3], six[1]]
    assert all(found.nbytes > 1000 for found in told)
    assert len(Repository(root).versions("m")) == 6
    assert collect_garbage(root, "m", keep=2) == told
    assert Repository(root).versions("m") == sorted([six[0], six[2], six[4], six[5]])
    assert collect_garbage(root, "m", keep=2) == []


@pytest.mark.parametrize(("keep", "left"), [(0, [0, 2]), (1, [0, 2, 5]), (6, [0, 1, 2, 3, 4, 5]), (99, range(6))])
def test_as_many_as_asked_for(root: Path, six: list[str], keep: int, left: list[int]) -> None:
    collect_garbage(root, "m", keep=keep)
    assert Repository(root).versions("m") == sorted(six[number] for number in left)


def test_what_the_server_uses_stays(root: Path, six: list[str]) -> None:
    collect_garbage(root, "m", keep=0, unless=lambda: {six[4]})
    assert Repository(root).versions("m") == sorted([six[0], six[2], six[4]])


def test_what_gets_traffic_in_between_stays(root: Path, six: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def first(_root: Path, name: str, version: str, **_: object) -> Removed:
        if version == six[5]:
            raise Conflict("in use")
        return remove_version(root, name, version)

    monkeypatch.setattr("shared.repository_garbage.remove_version", first)
    told = collect_garbage(root, "m", keep=0)
    assert [found.version for found in told] == [six[4], six[3], six[1]]


def test_what_crashed_writers_left_goes_too(root: Path, six: list[str]) -> None:
    left = root / "m" / "versions" / ".new-0123-4567"
    left.mkdir()
    (left / "w").write_bytes(b"x" * 500)
    assert collect_garbage(root, "m", keep=9, dry_run=True) == [Removed("m", "", 500)]
    assert left.exists()
    assert collect_garbage(root, "m", keep=9) == [Removed("m", "", 500)]
    assert not left.exists()


def test_what_can_not_be_judged_stays(root: Path, six: list[str]) -> None:
    (root / "m" / "versions" / six[1] / "meta.json").write_text("{")
    collect_garbage(root, "m", keep=0)
    assert Repository(root).versions("m") == sorted(six[:3])
    (root / "m" / "traffic.json").write_text("{")
    with pytest.raises(RepositoryError, match=r"m/traffic.json"):
        collect_garbage(root, "m", keep=0)
    assert len(Repository(root).versions("m")) == 3


def test_a_model_without_versions_or_without_a_name(root: Path) -> None:
    assert collect_garbage(root, "m") == []
    with pytest.raises(UnknownModel):
        collect_garbage(root, "n")
