"""Load generator, one process: an open loop of planned calls, or a closed loop of N in flight. Nothing is parsed.

OPEN LOOP (with --phase, any number, one after the other): each call has a planned time and is sent then, answered or
not what came before. Latency counts from the planned time; a call's deadline is what is left of --deadline-ms, and one
that has nothing left is `not_sent`. The ledger has every call under exactly one outcome.

CLOSED LOOP (without --phase): --in-flight calls, the next one when one has ended.

With --json it prints one line of JSON when a phase begins (so that a parent can read the server's CPU clocks) and one
with the result; else a table. On a terminal, a progress bar.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench import arrivals, closed_loop, open_loop, payloads
from bench.report import table

EXAMPLES = """\
examples:
  # 200 a second for ten seconds, as independent callers send
  python -m bench.load --phase poisson:rate=200,seconds=10 --deadline-ms 250

  # quiet, then a ramp into overload, then quiet; small and large images; the Open Inference Protocol
  python -m bench.load --protocol open-inference --model efficientnet-lite0 --mix short=5,medium=4,long=1 \\
      --phase constant:rate=20,seconds=2 --phase ramp:rate=50,to=1000,seconds=10 --phase constant:rate=20,seconds=2

  # bursts of 32, every call of the run into a file, the result as JSON
  python -m bench.load --phase bursts:rate=300,burst=32,seconds=10 --json --records calls.csv

  # closed loop, 64 in flight
  python -m bench.load --in-flight 64 --window-s 5
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m bench.load",
        description=__doc__,
        epilog=f"{arrivals.__doc__}\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--address", default="127.0.0.1:8001", help="host:port (default: %(default)s)")
    found.add_argument("--json", action="store_true", help="lines of JSON instead of a table")
    what = found.add_argument_group("what is sent")
    what.add_argument("--protocol", choices=sorted(payloads.METHODS), default="native")
    what.add_argument("--model", default="", help="may stay empty for the native service with a single model")
    what.add_argument("--input", choices=payloads.KINDS, default="image")
    what.add_argument("--mix", type=_mix, default={"medium": 1.0}, help="short=WEIGHT,medium=WEIGHT,long=WEIGHT")
    what.add_argument("--payload", type=Path, help="file with a serialised request, instead of the above")
    what.add_argument("--method", help="full method name, e.g. /headrace.v1.Inference/Predict, for --payload")
    opened = found.add_argument_group("open loop")
    opened.add_argument("--phase", action="append", type=_phase, default=[], metavar="KIND:rate=N,seconds=N")
    opened.add_argument("--deadline-ms", type=float, default=1000.0, help="from the planned time (default: 1000)")
    opened.add_argument("--channels", type=int, default=1, help="connections (default: 1)")
    opened.add_argument("--seed", type=int, default=1, help="of arrivals and sizes")
    opened.add_argument(
        "--wire", choices=sorted(open_loop.WIRES), default="grpc", help="grpc.aio, or bare frames for half of its CPU"
    )
    opened.add_argument("--stages", action="store_true", help="with the server's own time in each stage")
    opened.add_argument("--records", type=Path, help="write every call as a line of CSV")
    closed = found.add_argument_group("closed loop")
    closed.add_argument("--in-flight", type=int, default=16)
    closed.add_argument("--warm-s", type=float, default=0.5)
    closed.add_argument("--window-s", type=float, default=3.0)
    return found


def main() -> None:
    """Parse the command line and run once."""
    given = parser().parse_args()
    method = given.method or payloads.METHODS[given.protocol]
    if given.payload:
        requests = {given.payload.name: given.payload.read_bytes()}
        weights = dict.fromkeys(requests, 1.0)
    else:
        weights = given.mix
        requests = {size: payloads.request(given.protocol, given.input, size, given.model) for size in weights}
    if given.phase:
        load = open_loop.Load(
            given.address, method, requests, weights, tuple(given.phase), given.deadline_ms / 1e3,
            given.channels, given.seed, given.stages, given.wire,
        )  # fmt: skip
        _open(given, load)
    else:
        payload = next(iter(requests.values()))
        plan = closed_loop.Plan(given.address, method, payload, given.in_flight, given.warm_s, given.window_s)
        _told(asyncio.run(closed_loop.run(plan, _say if given.json else _silent)), as_json=given.json)


def _open(given: argparse.Namespace, load: open_loop.Load) -> None:
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
    _told(result, as_json=given.json)


def _phase(text: str) -> arrivals.Phase:
    try:
        return arrivals.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _mix(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        size, _, weight = part.partition("=")
        try:
            found[size] = float(weight or 1)
        except ValueError:
            found[size] = -1.0
        if size not in payloads.SIZES or not 0 < found[size] < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{part!r} must be one of {', '.join(payloads.SIZES)}, =, a weight above 0"
            )
    return found


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
    return f"{table(header, rows)}\ngenerator: {result['cpu_ms_per_call']:.3f} ms of CPU a call"


_COLUMNS = (("ok_ms", "p50"), ("ok_ms", "p99"), ("refused_ms", "p99"), ("sent_after_plan_ms", "p99"))


if __name__ == "__main__":
    main()
