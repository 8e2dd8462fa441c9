"""`headrace detect`: boxes as a table or JSON lines, and drawn into the pictures where that is asked for."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headrace import many_inputs
from headrace.client import Client
from headrace.client_calls import DetectOptions
from headrace.client_results import Detected, Outcome
from headrace.many_inputs import Server, Task, percent
from headrace.output import literal, printable
from shared.errors import ExitCode, StartupError


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for, apart from the files."""

    address: str
    model: str
    options: DetectOptions
    draw: Path | None
    """Where the pictures with the boxes go: a file for one, a folder for several."""
    timeout_s: float


@dataclass(frozen=True)
class Picture:
    """One of the files given, which may be given twice."""

    file: Path
    target: Path | None
    """Where it is drawn."""

    def __str__(self) -> str:
        return str(self.file)


def run(files: Sequence[Path], wanted: Wanted, *, as_json: bool) -> int:
    """Detect in files and print the outcomes in the given order. Returns 0, or 1 when any file failed.

    Raises StartupError for a place that can't be drawn to.
    """
    targets: Sequence[Path | None] = [None] * len(files) if wanted.draw is None else _targets(files, wanted.draw)
    task = Detect(wanted.model, wanted.options)
    pictures = [Picture(file, target) for file, target in zip(files, targets, strict=True)]
    code = many_inputs.run(task, pictures, Server(wanted.address, wanted.timeout_s), as_json=as_json)
    if task.drawn and not as_json:
        where = printable(str(wanted.draw))
        sys.stderr.write(f"drawn into {where}\n" if len(files) == 1 else f"{task.drawn} pictures drawn into {where}\n")
    return code


class Detect(Task[Picture, Detected]):
    """Boxes in images."""

    doing = "detecting"
    failed = "images failed"

    def __init__(self, model: str, options: DetectOptions) -> None:
        self._model = model
        self._options = options
        self.drawn = 0
        """Pictures."""

    def one(self, client: Client, given: Picture) -> Detected:
        """See Task."""
        return client.detect(given.file, model=self._model, **self._options)

    def many(self, client: Client, given: Sequence[Picture]) -> Iterator[Outcome[Detected]]:
        """See Task."""
        files = [picture.file for picture in given]
        for outcome in client.detect_many(files, model=self._model, **self._options):
            yield Outcome(outcome.index, given[outcome.index], outcome.result, outcome.error)

    def keep(self, given: Picture, result: Detected) -> None:
        """Draw. Raises OSError."""
        if given.target is not None:
            from headrace.drawing import draw_file  # noqa: PLC0415 - OpenCV, which nobody else here needs

            draw_file(given.file, given.target, result.detections)
            self.drawn += 1

    def row(self, result: Detected) -> dict[str, Any]:
        """See Task."""
        return {
            "detections": [asdict(one) for one in result.detections],
            "width": result.width,
            "height": result.height,
        }

    def print_one(self, console: Console, result: Detected) -> None:
        """See Task."""
        table = Table(box=SIMPLE_HEAD)
        for heading in ("score", "class", "left", "top", "right", "bottom"):
            table.add_column(heading, justify="left" if heading == "class" else "right")
        for one in result.detections:
            sides = (f"{side:.0f}" for side in (one.left, one.top, one.right, one.bottom))
            table.add_row(percent(one.label.score), literal(one.label.name or one.label.index), *sides)
        console.print(table if result.detections else "nothing found")
        console.print(f"{result.width} × {result.height} pixels", style="dim", highlight=False)

    def print_many(self, console: Console, found: list[tuple[str, Detected]]) -> None:
        """See Task."""
        table = Table(box=SIMPLE_HEAD)
        table.add_column("file", overflow="fold")
        table.add_column("boxes", justify="right")
        table.add_column("what")
        for file, result in found:
            count = Counter(one.label.name or str(one.label.index) for one in result.detections)
            what = ", ".join(f"{many} × {name}" if many > 1 else name for name, many in count.most_common())
            table.add_row(literal(file), str(len(result.detections)), literal(what or "–"))
        console.print(table)


def _targets(files: Sequence[Path], draw: Path) -> Sequence[Path]:
    """Where each file's picture goes. Raises StartupError."""
    from headrace.drawing import SUFFIXES  # noqa: PLC0415 - OpenCV, which nobody else here needs

    is_file = draw.suffix.lower() in SUFFIXES and not draw.is_dir()
    if is_file and len(files) > 1:
        text = f"--draw is {draw}, one file for {len(files)} pictures: name a folder"
        raise StartupError(ExitCode.BAD_SETTINGS, text)
    if draw.suffix and not is_file and not draw.is_dir():
        text = f"--draw is {draw}: no folder is there, and pictures are written as {', '.join(SUFFIXES)}"
        raise StartupError(ExitCode.BAD_SETTINGS, text)
    targets = [draw] if is_file else _in_folder(files, draw)
    given = {file.resolve() for file in files}
    for target in targets:
        if target.resolve() in given:
            raise StartupError(ExitCode.BAD_SETTINGS, f"--draw would write over {target}, which is one of the pictures")
    return targets


def _in_folder(files: Sequence[Path], folder: Path) -> list[Path]:
    """`cat.jpg` becomes `cat-boxes.png`; a second picture of that name `cat-boxes-2.png`."""
    seen: Counter[str] = Counter()
    targets = []
    for file in files:
        seen[file.stem] += 1
        number = f"-{seen[file.stem]}" if seen[file.stem] > 1 else ""
        targets.append(folder / f"{file.stem}-boxes{number}.png")
    return targets
