"""`headrace embed`: texts as vectors. A table with how alike a few are, JSON lines, and a file for numpy."""

import errno
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headrace import many_inputs
from headrace.client import Client
from headrace.client_calls import EmbedOptions
from headrace.client_results import Embedded, Outcome
from headrace.many_inputs import Server, Task
from headrace.output import literal
from shared.errors import ExitCode, StartupError

FEW = 8
"""So many texts are compared with each other in a table: more columns do not fit a terminal."""
SHOWN = 60
"""Characters of a text in a table."""
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Of one text: far above what models read, and still a bound on this side for a pipe that never ends."""


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for, apart from the texts."""

    address: str
    model: str
    options: EmbedOptions
    out: Path | None
    """A file for the vectors, in numpy's form."""
    timeout_s: float


@dataclass(frozen=True)
class Line:
    """One text, as bytes, since those of a file may be no UTF-8."""

    number: int
    data: bytes

    def __str__(self) -> str:
        text = self.data.decode(errors="backslashreplace")
        return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"

    @property
    def text(self) -> str:
        """Raises OSError for what is no UTF-8."""
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            raise OSError(errno.EILSEQ, f"it is not UTF-8 at byte {error.start}") from None


def run(lines: Sequence[Line], wanted: Wanted, *, as_json: bool) -> int:
    """Embed texts and print the outcomes in the given order. Returns 0, or 1 when any text failed.

    Raises StartupError when the vectors can't be written.
    """
    task = Embed(wanted.model, wanted.options)
    code = many_inputs.run(task, lines, Server(wanted.address, wanted.timeout_s), as_json=as_json)
    if wanted.out is not None:
        save(wanted.out, [task.vectors.get(line.number) for line in lines])
    return code


class Embed(Task[Line, Embedded]):
    """Vectors of texts."""

    doing = "embedding"
    failed = "texts could not be embedded"

    def __init__(self, model: str, options: EmbedOptions) -> None:
        self._model = model
        self._options = options
        self.vectors: dict[int, tuple[float, ...]] = {}
        """By the texts' numbers."""

    def one(self, client: Client, given: Line) -> Embedded:
        """See Task."""
        return client.embed(given.text, model=self._model, **self._options)

    def many(self, client: Client, given: Sequence[Line]) -> Iterator[Outcome[Embedded]]:
        """See Task."""
        good = []
        for index, line in enumerate(given):
            try:
                good.append((index, line.text))
            except OSError as error:
                yield Outcome(index, line, error=error)
        for outcome in client.embed_many([text for _, text in good], model=self._model, **self._options):
            index = good[outcome.index][0]
            yield Outcome(index, given[index], outcome.result, outcome.error)

    def keep(self, given: Line, result: Embedded) -> None:
        """See Task."""
        self.vectors[given.number] = result.values

    def named(self, given: Line) -> dict[str, Any]:
        """See Task."""
        return {"text": given.data.decode(errors="backslashreplace")}

    def row(self, result: Embedded) -> dict[str, Any]:
        """See Task."""
        return {"embedding": result.values, "tokens": result.tokens, "truncated": result.truncated}

    def print_one(self, console: Console, result: Embedded) -> None:
        """See Task."""
        first = ", ".join(f"{value:.4f}" for value in result.values[:4])
        cut = ", cut" if result.truncated else ""
        told = f"{result.tokens} tokens{cut} → {len(result.values)} numbers of norm {norm(result.values):.4f}"
        console.print(literal(f"{told}: [{first}{', …' if len(result.values) > 4 else ''}]"))

    def print_many(self, console: Console, found: list[tuple[str, Embedded]]) -> None:
        """See Task."""
        few = len(found) <= FEW
        table = Table(box=SIMPLE_HEAD)
        table.add_column("", justify="right")
        table.add_column("text", overflow="fold")
        table.add_column("tokens", justify="right")
        table.add_column("norm", justify="right")
        for number in range(1, len(found) + 1) if few else ():
            table.add_column(f"like {number}", justify="right")
        for number, (text, result) in enumerate(found, 1):
            tokens = f"{result.tokens}{'+' if result.truncated else ''}"
            alike = [f"{cosine(result.values, other.values):.2f}" for _, other in found] if few else []
            table.add_row(str(number), literal(text), tokens, f"{norm(result.values):.4f}", *alike)
        console.print(table)


def norm(values: Sequence[float]) -> float:
    """A vector's length."""
    return math.sqrt(math.fsum(value * value for value in values))


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """How alike two vectors are, -1..1; 0 where one has no length."""
    lengths = norm(one) * norm(other)
    return math.fsum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0


def save(path: Path, vectors: Sequence[tuple[float, ...] | None]) -> None:
    """`[texts, dimensions]` float32 in numpy's form; a text that failed is a row of NaN. Raises StartupError."""
    import numpy as np  # noqa: PLC0415 - only where a file is asked for

    width = next((len(vector) for vector in vectors if vector is not None), 0)
    rows = np.array([vector or [math.nan] * width for vector in vectors], np.float32).reshape(len(vectors), width)
    try:
        with path.open("wb") as file:
            np.save(file, rows)
    except OSError as error:
        raise StartupError(ExitCode.BAD_SETTINGS, f"--out {path} can't be written: {error.strerror}") from None


def lines_of(texts: Iterable[str], files: Iterable[Path], stdin: BinaryIO | None) -> list[Line]:
    """The texts, then the lines of the files, then those of standard input; blank lines are left out.

    Raises StartupError for a file that can't be read, a line of over 16 MiB, and when there is no text at all.
    """
    found = [text.encode(errors="surrogateescape") for text in texts]
    for path in files:
        try:
            with path.open("rb") as file:
                found += _lines(file, str(path))
        except OSError as error:
            raise StartupError(ExitCode.BAD_SETTINGS, f"--file {path} can't be read: {error.strerror}") from None
    if stdin is not None:
        found += _lines(stdin, "standard input")
    if not found:
        raise StartupError(
            ExitCode.BAD_SETTINGS, "no text is given: name texts, --file with one a line, or - for standard input"
        )
    return [Line(number, data) for number, data in enumerate(found)]


def _lines(file: BinaryIO, told: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise StartupError(
                ExitCode.BAD_SETTINGS, f"{told}: line {number} has over {MAX_LINE_BYTES >> 20} MiB, too much for a text"
            )
        text = line.rstrip(b"\r\n")
        if text.strip():
            yield text
