"""`headrace classify`: one input with its classes and stage times, many as a table, or JSON lines for programs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headrace import many_inputs
from headrace.client import Client
from headrace.client_results import Classified, File, Outcome, Text
from headrace.many_inputs import Server, Task, percent
from headrace.output import literal
from shared.errors import ExitCode, StartupError


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for, apart from the inputs."""

    address: str
    model: str
    top_k: int | None
    """None: as many as the server gives without being asked, which every model can."""
    timeout_s: float


@dataclass(frozen=True)
class Words:
    """A text, beside files."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Plain:
    """A file that is sent as it is, not as an image."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Given: TypeAlias = Path | Plain | Words
_UNDECODED = re.compile("[\ud800-\udfff]")
"""How Python keeps the bytes of an argument that are no UTF-8."""


def inputs_of(files: Sequence[Path] | None, texts: Sequence[str] | None, *, as_file: bool = False) -> list[Given]:
    """The files, as images or with `as_file` as they are, then the texts.

    Raises StartupError when there is nothing to classify, or a text is no UTF-8.
    """
    named: list[Given] = [Plain(file) if as_file else file for file in files or ()]
    found = [*named, *map(Words, texts or ())]
    if any(_UNDECODED.search(text) for text in texts or ()):
        raise StartupError(ExitCode.BAD_SETTINGS, "--text is not UTF-8")
    if not found:
        raise StartupError(
            ExitCode.BAD_SETTINGS,
            "nothing to classify is given: name image files, or others with --as-file, or use --text",
        )
    return found


def run(given: Sequence[Given], wanted: Wanted, *, as_json: bool) -> int:
    """Classify inputs and print the outcomes in the given order. Returns 0, or 1 when any of them failed."""
    task = Classify(wanted.model, wanted.top_k)
    return many_inputs.run(task, given, Server(wanted.address, wanted.timeout_s), as_json=as_json)


class Classify(Task[Given, Classified]):
    """Classes of images, files and texts."""

    doing = "classifying"
    failed = "inputs could not be classified"

    def __init__(self, model: str, top_k: int | None) -> None:
        self._model = model
        self._top_k = top_k

    def one(self, client: Client, given: Given) -> Classified:
        """See Task."""
        return client.classify(_as_input(given), top_k=self._top_k, model=self._model)

    def many(self, client: Client, given: Sequence[Given]) -> Iterator[Outcome[Classified]]:
        """See Task."""
        inputs = [_as_input(one) for one in given]
        for outcome in client.classify_many(inputs, top_k=self._top_k, model=self._model):
            yield Outcome(outcome.index, given[outcome.index], outcome.result, outcome.error)

    def named(self, given: Given) -> dict[str, Any]:
        """See Task."""
        return {"text": given.text} if isinstance(given, Words) else super().named(given)

    def row(self, result: Classified) -> dict[str, Any]:
        """See Task."""
        return {"labels": [asdict(label) for label in result.labels]}

    def print_one(self, console: Console, result: Classified) -> None:
        """See Task."""
        table = Table(box=SIMPLE_HEAD)
        for heading in ("score", "class", "index"):
            table.add_column(heading, justify="left" if heading == "class" else "right")
        for label in result.labels:
            table.add_row(percent(label.score), literal(label.name or "–"), str(label.index))
        console.print(table)

    def print_many(self, console: Console, found: list[tuple[str, Classified]]) -> None:
        """See Task."""
        table = Table(box=SIMPLE_HEAD)
        table.add_column("input", overflow="fold")
        table.add_column("score", justify="right")
        table.add_column("class")
        table.add_column("also likely")
        for file, result in found:
            if not result.labels:
                table.add_row(literal(file), "", literal("none", "dim"), "")
                continue
            first, *others = result.labels
            also = ", ".join(label.name or str(label.index) for label in others)
            name = literal(first.name or first.index)
            table.add_row(literal(file), percent(first.score), name, literal(also, "dim"))
        console.print(table)


def _as_input(given: Given) -> Path | File | Text:
    if isinstance(given, Plain):
        return File(given.path)
    return Text(given.text) if isinstance(given, Words) else given
