"""Two photos with people, a bus and ties: fetched by name and hash, never committed (AGPL-3.0)."""

import zipfile
from pathlib import Path

from headrace.zoo_packages import Package, cache_of, download
from shared.repository_writer import write_atomically
from tests.support.stack import ROOT

_PACKAGE = Package(
    "ultralytics",
    "8.4.190",
    "bd309728efa168af64d39040136828edd2dbcb4aeceb4510bdff4f3ca0ea01b8",
    "ultralytics-8.4.190-py3-none-any.whl",
)


def street(name: str) -> Path:
    """`bus.jpg` (810 × 1080) or `zidane.jpg` (1280 × 720), in `.cache/street`."""
    cache = cache_of(ROOT / "models")
    path = cache / "street" / name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(download(_PACKAGE, cache)) as archive:
            write_atomically(path, archive.read(f"ultralytics/assets/{name}"))
    return path
