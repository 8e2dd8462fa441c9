"""`make bench-overload`: what is left of the server's peak when twice and four times as much is asked of it.

One 500×375 JPEG a call through the real server with default settings; the accelerator is simulated (2 ms + 0.05 ms a
row, no CPU). The peak P is the rate of a closed loop of 64 in flight. All else is an open loop with deadlines of 250 ms
from the planned time, the generator on the same cores:

poisson  60 % of P: how long does a row wait in the queue?
bursts   the same in bursts of 16
2x, 4x   Poisson at 2 P and 4 P, between trickles of 40 a second that tell the time back to normal
…-bare   the same by a generator that needs half the CPU: bare HTTP/2 frames instead of grpc.aio
slow     a model that makes 100 rows a second (10 ms a row, batches of 8), at ten times that

Every run's ledger (what callers saw against what the server counted, by reason) must close, or the exit code is 1.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from bench import overload_report as report
from bench.contestants import ROOT, Contestant, headrace, simulated_repository
from bench.overload_run import Outcome, closed, mark_void, run

A_MS, B_MS = 2.0, 0.05
SLOW_MS, SLOW_ROWS = 10.0, 8
"""A row and a batch of the slow model: 100 rows a second, whatever the size of a batch."""
DEADLINE_MS = 250
IN_FLIGHT = 64
PEAK_S = 4.0
LIGHT = 0.6
LIGHT_S = 5.0
BURST = 16
TRICKLE = "constant:rate=40,name=trickle,seconds="
BEFORE_S, AFTER_S = 1.5, 2.0
PAUSE_S = 0.5
"""Between two runs."""
EASY, HARD = ("poisson", "bursts"), {"2x": 2.0, "2x-bare": 2.0, "4x": 4.0, "4x-bare": 4.0, "slow": 10.0}
"""Loads: below the peak, and how many times the peak."""
BARE = "-bare"


def main() -> None:
    """Run all rounds, print the tables, write JSON and page."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="each figure is the median of the rounds (default: 3)")
    parser.add_argument("--loads", nargs="+", default=[*EASY, *HARD], choices=[*EASY, *HARD], metavar="LOAD")
    parser.add_argument("--seconds", type=float, default=7.0, help="of each overload (default: 7)")
    parser.add_argument("--channels", type=int, default=4, help="connections of the open loop (default: 4)")
    parser.add_argument("--peak", type=float, help="take P as given instead of measuring it")
    parser.add_argument("--no-write", action="store_true", help="only print")
    given = parser.parse_args()
    started_s = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        bench = Bench(Path(folder), given)
        for number in range(1, given.rounds + 1):
            print(f"round {number} of {given.rounds}, {time.monotonic() - started_s:.0f} s", file=sys.stderr)
            outcomes += bench.round(number, given.loads)
    command = " ".join(["make bench-overload"] if len(sys.argv) == 1 else ["python -m bench.overload", *sys.argv[1:]])
    facts = {"command": command, "rounds": given.rounds, "seconds": round(time.monotonic() - started_s)}
    facts |= {
        "autogroups": autogroups(),
        "channels": given.channels,
        "load_s": given.seconds,
        "deadline_ms": DEADLINE_MS,
    }
    report.write(outcomes, facts, folder=None if given.no_write else ROOT)
    for outcome in outcomes:
        for fault in outcome.faults:
            print(f"round {outcome.round}, {outcome.name}: the ledger does not close: {fault}", file=sys.stderr)
    if any(outcome.faults for outcome in outcomes):
        raise SystemExit(1)


def autogroups() -> str:
    """Whether this kernel shares the cores out between sessions; each process of the server is one."""
    try:
        return "on" if int(Path("/proc/sys/kernel/sched_autogroup_enabled").read_text(encoding="ascii")) else "off"
    except (OSError, ValueError):
        return "off"


class Bench:
    """The model folders of one run."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self._given = given
        self._fast, self._slow = folder / "fast", folder / "slow"
        self._fast.mkdir()
        self._slow.mkdir()
        self._fast_models = simulated_repository(self._fast, A_MS, B_MS)
        self._slow_models = simulated_repository(self._slow, 0.0, SLOW_MS, SLOW_ROWS)

    def round(self, number: int, loads: Iterable[str]) -> list[Outcome]:
        """Each load once, every model on a fresh server."""
        found: list[Outcome] = []
        quick = [load for load in loads if load != "slow"]
        with ExitStack() as stack:
            if quick:
                server = stack.enter_context(headrace(self._fast_models))
                peak = self._given.peak or closed(server, IN_FLIGHT, PEAK_S)
                found += [self._load(server, load, peak, number) for load in quick]
            if not self._given.peak and (warning := mark_void(found)):
                print(f"round {number}: {warning}", file=sys.stderr)
        if "slow" in loads:
            with headrace(self._slow_models) as server:
                found.append(self._load(server, "slow", 1e3 / SLOW_MS, number))
        return found

    def _load(self, server: Contestant, load: str, peak: float, number: int) -> Outcome:
        print(f"  {load}, P = {peak:.0f}/s", file=sys.stderr)
        time.sleep(PAUSE_S)
        arguments = ["--deadline-ms", str(DEADLINE_MS), "--channels", str(self._given.channels), "--seed", str(number)]
        if load in EASY:
            phase = f"{load}:rate={LIGHT * peak},seconds={LIGHT_S},burst={BURST}"
            outcome = run(server, load, [*arguments, "--stages", "--phase", phase])
        else:
            phases = [
                f"{TRICKLE}{BEFORE_S}",
                f"poisson:rate={HARD[load] * peak},seconds={self._given.seconds}",
                f"{TRICKLE}{AFTER_S}",
            ]
            arguments += ["--wire", "http2"] if load.endswith(BARE) else []
            arguments += [word for phase in phases for word in ("--phase", phase)]
            outcome = run(server, load, arguments, measured=1)
        outcome.round, outcome.peak_per_s = number, peak
        return outcome


if __name__ == "__main__":
    main()
