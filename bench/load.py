"""Load generator, one process: an open loop of planned calls, or a closed loop of N in flight. Nothing is parsed.

OPEN LOOP (with --phase, any number, one after the other): each call has a planned time and is sent then, answered or
not what came before. Latency counts from the planned time; a call's deadline is what is left of --deadline-ms, and one
that has nothing left is `not_sent`. The ledger has every call under exactly one outcome.

CLOSED LOOP (without --phase): --in-flight calls, the next one when one has ended.

With --json it prints one line of JSON when a phase begins (so that a parent can read the server's CPU clocks) and one
with the result; else a table, with the text of one call of each outcome. On a terminal, a progress bar.

Exit code: 0; 1 when not one call was ok; 2 for wrong arguments and when no server answers.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench import closed_loop, open_loop, payloads
from bench.ledger import OK
from bench.load_arguments import arguments
from bench.report import table
from bench.wire import NotThere

FIRST = 10
"""Steps of priority above others with --first."""


def main() -> None:
    """Parse the command line and run once. Exits with 2 without a server, with 1 when not one call was OK."""
    given = arguments(__doc__ or "")
    method = given.method or payloads.METHODS[given.protocol]
    requests = given.payload or {
        size: payloads.request(given.protocol, given.input, size, given.model) for size in given.mix
    }
    weights = dict.fromkeys(requests, 1.0) if given.payload else given.mix
    if given.first:
        _go_first()
    try:
        if given.phase:
            load = open_loop.Load(
                given.address, method, requests, weights, tuple(given.phase), given.deadline_ms / 1e3,
                given.channels, given.seed, given.stages, given.wire,
            )  # fmt: skip
            result = _open(given, load)
        else:
            payload = next(iter(requests.values()))
            plan = closed_loop.Plan(given.address, method, payload, given.in_flight, given.warm_s, given.window_s)
            result = asyncio.run(closed_loop.run(plan, _say if given.json else _silent))
    except NotThere as error:
        _exit(2, str(error))
    except TimeoutError:
        _exit(1, f"calls to {given.address} did not end, not even {open_loop.GRACE_S:g} s after their deadline")
    _told(result, as_json=given.json)
    if fault := nothing_ok(result):
        _exit(1, f"{given.address}: {fault}")


def _go_first() -> None:
    """Above others, as a process and, where the kernel schedules sessions, as a session."""
    with contextlib.suppress(OSError):
        os.nice(-FIRST)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(-FIRST), encoding="ascii")


def nothing_ok(result: dict[str, Any]) -> str:
    """A sentence when calls were made and none was OK, and why; else nothing."""
    if "total" in result:
        ended = result["total"]["outcomes"]
        fine = not ended or OK in ended
    else:
        ended, fine = result["errors"], result["requests"]
    if fine:
        return ""
    why = "; ".join(f"{count} {name}: {result['samples'].get(name, '')}" for name, count in ended.items())
    return f"not one call was ok: {why or 'none ended within the window'}"


def _exit(code: int, sentence: str) -> NoReturn:
    sys.stderr.write(f"python -m bench.load: {sentence}\n")
    raise SystemExit(code)


def _open(given: argparse.Namespace, load: open_loop.Load) -> dict[str, Any]:
    sender = open_loop.Sender(load)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[ended]} ended"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, auto_refresh=False, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("sending", total=len(sender.records), ended=0)

        def show(sent: int, ended: int) -> None:
            bar.update(task, completed=sent, ended=ended)
            bar.refresh()

        say = _say if given.json else _silent
        result = asyncio.run(sender.run(say, show if console.is_terminal else None))
    if given.records:
        given.records.write_text("\n".join(sender.records.lines()) + "\n")
    return result


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _silent(**_fields: object) -> None:
    """Nobody reads along."""


def _told(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _say(event="result", **result)
    elif "phases" in result:
        print(open_table(result))
    else:
        print(json.dumps(result, indent=1))


def open_table(result: dict[str, Any]) -> str:
    """The ledger by phase and by size, for a terminal."""
    groups = {phase["name"]: phase for phase in result["phases"]}
    groups |= {f"size {size}": found for size, found in result["sizes"].items()} if len(result["sizes"]) > 1 else {}
    groups["all"] = result["total"]
    outcomes = sorted(result["total"]["outcomes"])
    rows = [
        [
            name,
            str(found["planned"]),
            *(str(found["outcomes"].get(outcome, 0)) for outcome in outcomes),
            *(f"{found[kind].get(share, float('nan')):.1f}" for kind, share in _COLUMNS),
        ]
        for name, found in groups.items()
    ]
    header = ["", "planned", *outcomes, "OK p50 ms", "OK p99 ms", "refused p99 ms", "sent late p99 ms"]
    why = "".join(f"{outcome}: {text}\n" for outcome, text in result["samples"].items())
    return f"{table(header, rows)}\n{why}generator: {result['cpu_ms_per_call']:.3f} ms of CPU a call"


_COLUMNS = (("ok_ms", "p50"), ("ok_ms", "p99"), ("refused_ms", "p99"), ("sent_after_plan_ms", "p99"))


if __name__ == "__main__":
    main()
