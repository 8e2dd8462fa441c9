"""Outcomes → the printed tables, bench/results/overload.json and docs/benchmarks/overload.md."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.overload_run import NORMAL, POINTS, WINDOW, Outcome
from bench.report import machine_facts, table

ROLES = ("gateway", "pool", "worker")
LIBRARIES = ("grpcio", "protobuf", "pyzmq", "msgspec", "opencv-python-headless", "numpy")
TITLES = {
    "poisson": "0.6 P, Poisson",
    "bursts": "0.6 P, bursts of 16",
    "2x": "2 P",
    "4x": "4 P",
    "2x-bare": "2 P, bare frames",
    "4x-bare": "4 P, bare frames",
    "slow": "100 a second, at 10 P",
}
_NONE = float("nan")


def write(outcomes: Sequence[Outcome], facts: dict[str, Any], folder: Path | None) -> None:
    """Print the tables; with a folder (the root), also write the JSON and the page."""
    tables = {
        "main": _medians(outcomes, _MAIN) + _voids(outcomes),
        "usage": _medians(outcomes, _CORES),
        "queue": _medians([outcome for outcome in outcomes if "stages_ms" in outcome.load], _QUEUE),
        "drops": _drops(outcomes),
        "ledger": _ledger(outcomes),
    }
    print("\n\n".join(found for found in tables.values() if found.count("\n") > 1))
    if folder is None:
        return
    machine = machine_facts(LIBRARIES)
    results = folder / "bench" / "results" / "overload.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(
        json.dumps({"run": facts, "machine": machine, "runs": [_plain(o) for o in outcomes]}, indent=1) + "\n"
    )
    libraries = ", ".join(f"{name} {machine[name]}" for name in LIBRARIES)
    page = folder / "docs" / "benchmarks" / "overload.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_PAGE.format(libraries=libraries, window=WINDOW, normal=NORMAL, **tables, **facts, **machine))


Column = tuple[str, Callable[[Outcome], float], str]
"""Heading, figure of one run (NaN: it has none), format."""


def _of(*path: str) -> Callable[[Outcome], float]:
    """A number of the measured phase."""

    def read(outcome: Outcome) -> float:
        found: Any = outcome.load
        for key in path:
            found = found.get(key, {})
        return float(found) if isinstance(found, int | float) else _NONE

    return read


def _back_s(outcome: Outcome) -> float:
    return _NONE if outcome.back_to_normal_s is None else outcome.back_to_normal_s


_MAIN: tuple[Column, ...] = (
    ("P/s", lambda outcome: outcome.peak_per_s, ".0f"),
    ("offered/s", _of("offered_per_s"), ".0f"),
    ("goodput/s", _of("goodput_per_s"), ".0f"),
    ("goodput ÷ P", lambda outcome: outcome.goodput, ".2f"),
    ("answer p50 ms", _of("ok_ms", "p50"), ".0f"),
    ("p99", _of("ok_ms", "p99"), ".0f"),
    ("refusal p50 ms", _of("refused_ms", "p50"), ".1f"),
    ("p99", _of("refused_ms", "p99"), ".1f"),
    ("admitted but late", lambda outcome: outcome.late_share, ".1%"),
    ("rows for nobody", lambda outcome: outcome.nobody_share, ".1%"),
    ("back to normal s", _back_s, ".2f"),
)
_CORES: tuple[Column, ...] = (
    *(
        (role, lambda outcome, role=role: outcome.server_cores.get(role, 0.0), ".2f") for role in ROLES
    ),  # a default binds the role
    ("generator", _of("generator_cores"), ".2f"),
    ("others", lambda outcome: outcome.others_cores, ".2f"),
    ("generator ms/call", lambda outcome: outcome.result["cpu_ms_per_call"], ".3f"),
    ("sent late p99 ms", _of("sent_after_plan_ms", "p99"), ".1f"),
    ("memory before MB", lambda outcome: outcome.private_mb[0], ".0f"),
    ("after", lambda outcome: outcome.private_mb[1], ".0f"),
)
_QUEUE: tuple[Column, ...] = (
    ("batcher p50 ms", _of("stages_ms", "batch", "p50"), ".1f"),
    ("p99", _of("stages_ms", "batch", "p99"), ".1f"),
    ("pool wait p50 ms", _of("stages_ms", "wait", "p50"), ".1f"),
    ("p99", _of("stages_ms", "wait", "p99"), ".1f"),
    ("batch p50 ms", _of("stages_ms", "run", "p50"), ".1f"),
    ("answer p50 ms", _of("ok_ms", "p50"), ".1f"),
    ("p99", _of("ok_ms", "p99"), ".1f"),
)


def _medians(outcomes: Sequence[Outcome], columns: Sequence[Column]) -> str:
    rows = []
    for name in dict.fromkeys(outcome.name for outcome in outcomes):
        runs = [outcome for outcome in outcomes if outcome.name == name]
        cells = []
        for _, figure, form in columns:
            found = [value for value in map(figure, runs) if not math.isnan(value)]
            cells.append(format(median(found), form).replace("inf", "never") if found else "")
        star = "*" if any(run.void for run in runs) else ""
        rows.append([TITLES[name] + star, *cells])
    return table(["", *(heading for heading, _, _ in columns)], rows)


def _voids(outcomes: Sequence[Outcome]) -> str:
    """What the stars mean; nothing without one."""
    rounds = sorted({str(outcome.round) for outcome in outcomes if outcome.void})
    if not rounds:
        return ""
    return (
        f"\n\n(*) void in round {', '.join(rounds)}: goodput at 2 P is above P, so the machine was disturbed while P "
        "was measured."
    )


def _drops(outcomes: Sequence[Outcome]) -> str:
    """Items of all rounds, by point and reason."""
    rows = []
    for name in dict.fromkeys(outcome.name for outcome in outcomes):
        for point in POINTS:
            found: dict[str, int] = {}
            for outcome in outcomes:
                for reason, items in outcome.drops[point].items() if outcome.name == name else ():
                    found[reason] = found.get(reason, 0) + items
            rows += [[TITLES[name], point, reason, str(items)] for reason, items in sorted(found.items())]
    return table(["dropped, all rounds", "point", "reason", "items"], rows)


def _ledger(outcomes: Sequence[Outcome]) -> str:
    """One line a run: callers / server by word, then the allowed differences."""
    words = sorted({word for outcome in outcomes for word in (*outcome.callers, *outcome.server)})
    header = [
        "load",
        "round",
        "planned",
        "not sent",
        *words,
        "noticed",
        "mistaken",
        "crossed",
        "never arrived",
        "closes",
    ]
    rows = [
        [
            TITLES[outcome.name],
            str(outcome.round),
            str(outcome.result["total"]["planned"]),
            str(outcome.not_sent),
            *(f"{outcome.callers.get(word, 0)} / {outcome.server.get(word, 0)}" for word in words),
            str(outcome.ledger.noticed),
            str(outcome.ledger.mistaken),
            str(outcome.ledger.crossed),
            str(outcome.ledger.never_arrived),
            "no" if outcome.faults else "yes",
        ]
        for outcome in outcomes
    ]
    return table(header, rows)


def _plain(outcome: Outcome) -> dict[str, Any]:
    """For JSON: what was measured and what follows from it, rounded."""
    found = msgspec.to_builtins(outcome)
    back_s = outcome.back_to_normal_s
    found |= {"goodput": outcome.goodput, "late_share": outcome.late_share, "nobody_share": outcome.nobody_share}
    found["back_to_normal_s"] = "never" if back_s == float("inf") else back_s
    return dict(_rounded(found))


def _rounded(value: Any) -> Any:  # noqa: ANN401 - whatever JSON can hold
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


_PAGE = """# Overload: what is left of the peak

Written by `{command}` in {seconds} s. Every figure is the median of {rounds} rounds, which are all in
`bench/results/overload.json`. Machine: {cores} cores ({cpu}), Linux {kernel}, Python {python}, {libraries}.
The load generator runs on the same cores; *sent late* says how well it kept the planned times.
Scheduling autogroups are {autogroups}; containers and services have none, and where they are on, each process of the
server gets the same share of the cores, whatever its priority.

`headrace serve` with default settings; one 500×375 JPEG of 60 KB a call. The accelerator is simulated: 2 ms + 0.05 ms a
row, no CPU; the slow model takes 10 ms a row, so that it makes 100 rows a second.

- **P** is the rate of a closed loop of 64 calls in flight on the same server just before; of the slow model, 100.
- **Open loop**: Poisson over {channels} connections, {load_s:g} s at 2 P, 4 P and 10 P, each call with a deadline of
  {deadline_ms} ms from its *planned* time: a generator that falls behind, or a queue inside the client, makes nothing
  look better. A call that could not be sent before its deadline is *not sent*.
- **bare frames**: the load generator is grpc.aio, whose own CPU is missing to the server on these cores. In these rows
  it writes bare HTTP/2 frames instead (`bench/http2_wire.py`): the same calls, fewer of the machine's cycles.
- **goodput**: answers in time. **refusal**: RESOURCE_EXHAUSTED, from the moment of sending.
- **admitted but late**: of the calls that were not refused at the door, those without an answer in time.
  **rows for nobody**: of the computed rows, those whose caller had left.
- **back to normal**: after the load, calls go on at 40 a second. From the load's end to the first of {window} probes in
  a row that are all answered and whose median is at most {normal:g} × that of the same trickle before the load.

{main}

### CPU and memory

Cores used while the load lasts, by process; *others* are processes that are no part of the run: the further from 0,
the worse all figures. *sent late*: how far the generator was behind its plan. Memory is that of all server processes
without what they share, before the run and after it.

{usage}

### Time in the queue at 60 %

One batch takes 2 to 3.6 ms, and a row may wait up to 5 ms for company (`batching.max_wait_ms`): time in the batcher
should stay below 8.6 ms at p99. *pool wait* is for a slot and a free pool process, before that: a burst of 16 has 16
images to decode on the cores there are.

{queue}

### Where work was dropped

{drops}

### The ledger of every run

Calls by their end, *callers / server*. The server's words are those of its metrics. Callers have three of their own:
`expired` (their own clock ended the call), `left` and `unreachable`. Those are the only ones that may differ, and each
is accounted for: the server *noticed* it, or its answer *crossed* it on the way, or it *never arrived*. *Mistaken* are
those of the noticed that had expired and look cancelled to the server, when a call's end overtakes its beginning. The
ledger closes when every difference is one of these, none is negative, and all planned calls have an end.

{ledger}
"""
