"""The tree's files as the architecture tests see them: what is ours, parsed once."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PRODUCT = ("gateway", "workers", "preprocess_pool", "shared", "headrace")
"""Packages that run on a user's machine."""
_NOT_OURS = {"build", "dist", "versions", "__pycache__"}
_TEXT = {".py", ".pyi", ".toml", ".txt", ".md", ".yaml", ".yml", ".proto", ".json", ".sh", ".cfg", ".service", ""}


class Source(NamedTuple):
    """One Python file of ours."""

    path: str
    """Relative to the root, with `/`."""
    text: str
    tree: ast.Module

    @property
    def lines(self) -> list[str]:
        """The file's lines, without line ends."""
        return self.text.splitlines()

    @property
    def is_product(self) -> bool:
        """Whether it runs on a user's machine."""
        return self.path.split("/")[0] in PRODUCT

    @property
    def is_test(self) -> bool:
        """Whether it is a test or a fake."""
        return self.path.startswith("tests/")


def parse(path: str, text: str) -> Source:
    """Make a Source of a text; `path` decides which rules apply to it."""
    return Source(path, text, ast.parse(text))


def text_files() -> Iterator[Path]:
    """Every text file that could be committed: no hidden folders, caches, builds or fetched models."""
    folders = [ROOT]
    while folders:
        for entry in sorted(folders.pop().iterdir()):
            hidden = entry.name.startswith(".") and entry.name not in {".ci", ".gitignore"}
            if hidden or entry.name in _NOT_OURS or entry.name.endswith(".egg-info"):
                continue
            if entry.is_dir():
                folders.append(entry)
            elif entry.suffix in _TEXT:
                yield entry


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of ours; generated stubs are not."""
    ours = (path for path in text_files() if path.suffix == ".py" and "_pb2" not in path.name)
    return tuple(parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in ours)
