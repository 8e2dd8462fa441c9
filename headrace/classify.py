"""`headrace classify`: one file with its classes and stage times, many files as a table, or JSON lines for programs."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from headrace.client import Client
from headrace.client_errors import InferenceError
from headrace.client_results import Classified, Outcome, ServerTiming
from headrace.output import json_line, literal

STAGES = ("admit", "wait", "prepare", "batch", "copy", "run", "finish")


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
    failed = 0
    with Client(wanted.address, timeout_s=wanted.timeout_s) as client:
        outcomes = _in_order(_shown_progress(_classified(client, files, wanted), len(files)))
        if as_json:
            for outcome in outcomes:
                failed += outcome.result is None
                sys.stdout.write(json_line(as_row(outcome)) + "\n")
            if failed:  # the reasons are in the rows, which a program may have taken
                sys.stderr.write(f"headrace: {failed} of {len(files)} images could not be classified\n")
        else:
            found = list(outcomes)
            failed = sum(outcome.result is None for outcome in found)
            _print(found)
    return 1 if failed else 0


def _classified(client: Client, files: Sequence[Path], wanted: Wanted) -> Iterator[Outcome]:
    """All outcomes, as they finish. When the connection breaks, the files without an answer get that error."""
    if len(files) == 1:  # one call, which is tried again when the server says so
        yield _one(client, files[0], wanted)
        return
    open_indices = set(range(len(files)))
    try:
        for outcome in client.classify_many(files, top_k=wanted.top_k, model=wanted.model):
            open_indices.discard(outcome.index)
            yield outcome
    except InferenceError as error:
        for index in sorted(open_indices):
            yield Outcome(index, files[index], error=error)


def _one(client: Client, file: Path, wanted: Wanted) -> Outcome:
    try:
        return Outcome(0, file, result=client.classify(file, top_k=wanted.top_k, model=wanted.model))
    except (InferenceError, OSError) as error:
        return Outcome(0, file, error=error)


def _in_order(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Outcomes in the order of the files, each as soon as all before it are there."""
    early: dict[int, Outcome] = {}
    following = 0
    for outcome in outcomes:
        early[outcome.index] = outcome
        while following in early:
            yield early.pop(following)
            following += 1


def _shown_progress(outcomes: Iterable[Outcome], total: int) -> Iterable[Outcome]:
    console = Console(stderr=True)
    if total == 1 or not console.is_terminal:
        return outcomes
    return track(outcomes, "classifying", total=total, console=console, transient=True)


def reason_of(error: InferenceError | OSError | None) -> str:
    """A failure in one sentence."""
    if isinstance(error, OSError):
        return f"can't be read: {error.strerror or error}"
    if isinstance(error, InferenceError) and error.reason == "unreachable":
        return f"{error.text}; start a server with: headrace serve"
    return str(error)


def as_row(outcome: Outcome) -> dict[str, Any]:
    """One outcome as a JSON object: `file` and either `labels` … or `error`."""
    row: dict[str, Any] = {"file": str(outcome.image)}
    if outcome.result is None:
        error = outcome.error
        reason = error.reason if isinstance(error, InferenceError) else "unreadable"
        return {**row, "error": {"reason": reason, "text": reason_of(error)}}
    result = outcome.result
    return {
        **row,
        "labels": [asdict(label) for label in result.labels],
        "model": result.model,
        "version": result.version,
        "request_id": result.request_id,
        "server_timing": asdict(result.server_timing),
    }


def _print(outcomes: list[Outcome]) -> None:
    console = Console()
    good = [(str(outcome.image), outcome.result) for outcome in outcomes if outcome.result is not None]
    if len(outcomes) == 1 and good:
        _print_one(console, *good[0])
    elif good:
        _print_many(console, good)
    errors = Console(stderr=True)
    for outcome in outcomes:
        if outcome.result is None:
            reason = literal(f"{outcome.image}: {reason_of(outcome.error)}")
            errors.print(Text("✗ ", style="red") + reason, soft_wrap=True)


def _print_one(console: Console, title: str, result: Classified) -> None:
    console.print(literal(title, "bold"), soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    for heading in ("score", "class", "index"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for label in result.labels:
        table.add_row(percent(label.score), literal(label.name or "–"), str(label.index))
    console.print(table)
    line = f"{result.model} {result.version}  {timing_line(result.server_timing)}"
    console.print(literal(line, "dim"), soft_wrap=True)


def _print_many(console: Console, good: list[tuple[str, Classified]]) -> None:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("file", overflow="fold")
    table.add_column("score", justify="right")
    table.add_column("class")
    table.add_column("also likely")
    for file, result in good:
        first, *others = result.labels
        also = ", ".join(label.name or str(label.index) for label in others)
        name = literal(first.name or first.index)
        table.add_row(literal(file), percent(first.score), name, literal(also, "dim"))
    console.print(table)


def percent(score: float) -> str:
    """`97.3 %`."""
    return f"{score * 100:.1f} %"


def timing_line(timing: ServerTiming) -> str:
    """The stages that took time, in milliseconds, in their order."""
    times = [(stage, getattr(timing, f"{stage}_ms")) for stage in STAGES]
    told = " · ".join(f"{stage} {value:.1f}" for stage, value in times if value >= 0.05)
    return f"{told} ms, batch of {timing.batch_rows}" if told else "no stage times"
