"""One or many inputs through a running server, for `headrace classify`, `detect` and `embed`.

One goes in a call, which is tried again when the server says so; many go over one stream with a progress bar. A table
for people, JSON lines for programs, and an exit code for both.
"""

import abc
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.progress import track
from rich.text import Text

from headrace.client import Client
from headrace.client_errors import InferenceError, WrongTask
from headrace.client_results import Answered, Outcome, ServerTiming
from headrace.output import json_line, literal
from shared.errors import ExitCode, StartupError

G = TypeVar("G")
R = TypeVar("R", bound=Answered)
NAMED = 3
"""Of the inputs that failed for one reason; of the others only their number is told."""
STAGES = ("admit", "wait", "prepare", "batch", "copy", "run", "finish")


@dataclass(frozen=True)
class Server:
    """Where the inputs go, and how long each may take."""

    address: str
    timeout_s: float


class Task(abc.ABC, Generic[G, R]):
    """What a command does with its inputs (G) and their results (R)."""

    doing: str
    """Beside the progress bar, e.g. `classifying`."""
    failed: str
    """After "3 of 5", e.g. `images could not be classified`."""

    @abc.abstractmethod
    def one(self, client: Client, given: G) -> R:
        """One call. Raises InferenceError, OSError."""

    @abc.abstractmethod
    def many(self, client: Client, given: Sequence[G]) -> Iterator[Outcome[R]]:
        """One stream. Raises InferenceError when it breaks."""

    def keep(self, given: G, result: R) -> None:
        """Do with an answer what is asked besides showing it. Raises OSError: then this input has failed."""

    def named(self, given: G) -> dict[str, Any]:
        """What a JSON row begins with."""
        return {"file": str(given)}

    @abc.abstractmethod
    def row(self, result: R) -> dict[str, Any]:
        """The task's part of a JSON row."""

    @abc.abstractmethod
    def print_one(self, console: Console, result: R) -> None:
        """The only answer, below its input's name."""

    @abc.abstractmethod
    def print_many(self, console: Console, found: list[tuple[str, R]]) -> None:
        """One table of all inputs that were answered, by name."""


def run(task: Task[G, R], given: Sequence[G], server: Server, *, as_json: bool) -> int:
    """Send the inputs and print the outcomes in the given order. Returns 0, or 1 when any input failed.

    Raises StartupError when the model has another task.
    """
    with Client(server.address, timeout_s=server.timeout_s) as client:
        outcomes = _in_order(_shown_progress(_kept(task, given, _outcomes(task, client, given)), task, len(given)))
        try:
            failed = _write(task, given, outcomes) if as_json else _print(task, list(outcomes))
        except WrongTask as error:
            text = f"model {error.model} answers {error.answers}, not {error.wanted}: name another one with --model"
            raise StartupError(ExitCode.BAD_SETTINGS, text) from None
    return 1 if failed else 0


def _write(task: Task[G, R], given: Sequence[G], outcomes: Iterable[Outcome[R]]) -> int:
    """JSON lines, each as soon as it is there. Returns how many failed."""
    failed = 0
    for outcome in outcomes:
        failed += outcome.result is None
        sys.stdout.write(json_line(_as_row(task, given[outcome.index], outcome)) + "\n")
    if failed:  # the reasons are in the rows, which a program may have taken
        sys.stderr.write(f"headrace: {failed} of {len(given)} {task.failed}\n")
    return failed


def _outcomes(task: Task[G, R], client: Client, given: Sequence[G]) -> Iterator[Outcome[R]]:
    """All outcomes, as they finish. When the connection breaks, the inputs without an answer get that error."""
    if len(given) == 1:
        yield _one(task, client, given[0])
        return
    open_indices = set(range(len(given)))
    try:
        for outcome in task.many(client, given):
            open_indices.discard(outcome.index)
            yield outcome
    except InferenceError as error:
        for index in sorted(open_indices):
            yield Outcome(index, given[index], error=error)


def _one(task: Task[G, R], client: Client, given: G) -> Outcome[R]:
    try:
        return Outcome(0, given, result=task.one(client, given))
    except (InferenceError, OSError) as error:
        return Outcome(0, given, error=error)


def _kept(task: Task[G, R], given: Sequence[G], outcomes: Iterable[Outcome[R]]) -> Iterator[Outcome[R]]:
    for outcome in outcomes:
        try:
            if outcome.result is not None:
                task.keep(given[outcome.index], outcome.result)
        except OSError as error:
            yield Outcome(outcome.index, outcome.given, error=error)
        else:
            yield outcome


def _in_order(outcomes: Iterable[Outcome[R]]) -> Iterator[Outcome[R]]:
    """Outcomes in the order of the inputs, each as soon as all before it are there."""
    early: dict[int, Outcome[R]] = {}
    following = 0
    for outcome in outcomes:
        early[outcome.index] = outcome
        while following in early:
            yield early.pop(following)
            following += 1


def _shown_progress(outcomes: Iterable[Outcome[R]], task: Task[G, R], total: int) -> Iterable[Outcome[R]]:
    console = Console(stderr=True)
    if total == 1 or not console.is_terminal:
        return outcomes
    return track(outcomes, task.doing, total=total, console=console, transient=True)


def reason_of(error: InferenceError | OSError | None) -> str:
    """A failure in one sentence."""
    if isinstance(error, OSError):
        return f"can't be {'written' if isinstance(error, NotWritten) else 'read'}: {error.strerror or error}"
    if isinstance(error, InferenceError) and error.reason == "unreachable":
        return f"{error.text}; start a server with: headrace serve"
    return str(error)


class NotWritten(OSError):
    """A file that a command was to make of a result."""


def _as_row(task: Task[G, R], given: G, outcome: Outcome[R]) -> dict[str, Any]:
    row = task.named(given)
    if outcome.result is None:
        error = outcome.error
        reason = error.reason if isinstance(error, InferenceError) else "unreadable"
        reason = "unwritable" if isinstance(error, NotWritten) else reason
        return {**row, "error": {"reason": reason, "text": reason_of(error)}}
    result = outcome.result
    return {
        **row,
        **task.row(result),
        "model": result.model,
        "version": result.version,
        "request_id": result.request_id,
        "server_timing": asdict(result.server_timing),
    }


def _print(task: Task[G, R], outcomes: list[Outcome[R]]) -> int:
    """Tables for people. Returns how many failed."""
    console = Console()
    good = [(str(outcome.given), outcome.result) for outcome in outcomes if outcome.result is not None]
    if len(outcomes) == 1 and good:
        title, result = good[0]
        console.print(literal(title, "bold"), soft_wrap=True)
        task.print_one(console, result)
        line = f"{result.model} {result.version}  {timing_line(result.server_timing)}"
        console.print(literal(line, "dim"), soft_wrap=True)
    elif good:
        task.print_many(console, good)
    errors = Console(stderr=True)
    bad = [outcome for outcome in outcomes if outcome.result is None]
    alike: dict[str, list[str]] = {}
    for outcome in bad:
        alike.setdefault(reason_of(outcome.error), []).append(str(outcome.given))
    for reason, names in alike.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        told = literal(f"{', '.join(names[:NAMED])}{more}: {reason}")
        errors.print(Text("✗ ", style="red") + told, soft_wrap=True)
    return len(bad)


def percent(score: float) -> str:
    """`97.3 %`."""
    return f"{score * 100:.1f} %"


def timing_line(timing: ServerTiming) -> str:
    """The stages that took time, in milliseconds, in their order."""
    times = [(stage, getattr(timing, f"{stage}_ms")) for stage in STAGES]
    told = " · ".join(f"{stage} {value:.1f}" for stage, value in times if value >= 0.05)
    return f"{told} ms, batch of {timing.batch_rows}" if told else "no stage times"
