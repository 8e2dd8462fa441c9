"""`headrace classify`: one file with its classes and stage times, many files as a table, or JSON lines for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headrace import many_inputs
from headrace.client import Client
from headrace.client_results import Classified, Outcome
from headrace.many_inputs import Server, Task, percent
from headrace.output import literal


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for, apart from the files."""

    address: str
    model: str
    top_k: int | None
    """None: as many as the server gives without being asked, which every model can."""
    timeout_s: float


def run(files: Sequence[Path], wanted: Wanted, *, as_json: bool) -> int:
    """Classify files and print the outcomes in the given order. Returns 0, or 1 when any file failed."""
    task = Classify(wanted.model, wanted.top_k)
    return many_inputs.run(task, files, Server(wanted.address, wanted.timeout_s), as_json=as_json)


class Classify(Task[Path, Classified]):
    """Classes of images."""

    doing = "classifying"
    failed = "images could not be classified"

    def __init__(self, model: str, top_k: int | None) -> None:
        self._model = model
        self._top_k = top_k

    def one(self, client: Client, given: Path) -> Classified:
        """See Task."""
        return client.classify(given, top_k=self._top_k, model=self._model)

    def many(self, client: Client, given: Sequence[Path]) -> Iterator[Outcome[Classified]]:
        """See Task."""
        return client.classify_many(given, top_k=self._top_k, model=self._model)

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
        table.add_column("file", overflow="fold")
        table.add_column("score", justify="right")
        table.add_column("class")
        table.add_column("also likely")
        for file, result in found:
            first, *others = result.labels
            also = ", ".join(label.name or str(label.index) for label in others)
            name = literal(first.name or first.index)
            table.add_row(literal(file), percent(first.score), name, literal(also, "dim"))
        console.print(table)
