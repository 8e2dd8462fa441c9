"""Pictures to try models on, out of ordinary packages: fetched into the cache, never part of the source."""

import re
import zipfile
from pathlib import Path

import msgspec

from headrace.zoo_packages import Package, Report, cache_of, download, member, quiet
from shared.repository_writer import write_atomically

PICTURES = ("bus.jpg", "zidane.jpg")
"""A street with four persons and a bus, 810 × 1080; two men and a tie, 1280 × 720."""
_PHOTO = re.compile(r"foolbox/data/(imagenet_\d+_(\d+)\.jpg)")
_PHOTOS = Package(
    "foolbox",
    "3.3.4",
    "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
    "foolbox-3.3.4-py3-none-any.whl",
    1_677_112,
)
_PICTURES = Package(
    "ultralytics",
    "8.4.190",
    "bd309728efa168af64d39040136828edd2dbcb4aeceb4510bdff4f3ca0ea01b8",
    "ultralytics-8.4.190-py3-none-any.whl",
    1433396,
)


class Photo(msgspec.Struct, frozen=True):
    """A sample photo with its true class."""

    path: Path
    label: int


def fetch_photos(repository: Path, report: Report = quiet) -> list[Photo]:
    """The 20 sample photos with their true ImageNet classes, in `.cache/photos`. Raises StartupError."""
    cache = cache_of(repository)
    folder = cache / "photos"
    photos = _photos_in(folder)
    if len(photos) != 20:
        wheel = download(_PHOTOS, cache, report)
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                found = _PHOTO.fullmatch(name)
                if found:
                    write_atomically(folder / found[1], archive.read(name))
        photos = _photos_in(folder)
    return photos


def fetch_pictures(repository: Path, report: Report = quiet) -> list[Path]:
    """`PICTURES`, for detectors, in `.cache/pictures`. Raises StartupError. AGPL-3.0: to look at, not to pass on."""
    cache = cache_of(repository)
    paths = [cache / "pictures" / name for name in PICTURES]
    if not all(path.is_file() for path in paths):
        wheel = download(_PICTURES, cache, report)
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            write_atomically(path, member(wheel, f"ultralytics/assets/{path.name}"))
    return paths


def _photos_in(folder: Path) -> list[Photo]:
    found = []
    for path in sorted(folder.glob("imagenet_*.jpg")):
        match = _PHOTO.fullmatch(f"foolbox/data/{path.name}")
        if match:
            found.append(Photo(path, int(match[2])))
    return found
