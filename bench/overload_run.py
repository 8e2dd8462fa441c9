"""One run of the load generator against a running server, with the server's CPU, memory and counters around it."""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from bench.contestants import ROOT, Contestant
from bench.ledger import OK, Ledger, compare, server_calls, server_drops, server_rows, since
from bench.processes import cpu_s_by_role, private_mb
from bench.records import callers_words, percentile

METHOD = "Predict"
SETTLE_LIMIT_S = 3.0
"""After the last caller has left: the server has counted every call long before."""
STEP_S = 0.02
POINTS = ("admission", "prepare", "batch", "copy")
NORMAL = 1.5
"""Back to normal: the median of WINDOW probes is at most this many times what it was before the load."""
WINDOW = 8


PLAUSIBLE = 1.02
"""More goodput than this times P, at twice P: the server can do more than P, so P was measured too low."""


class Counters(NamedTuple):
    """What `/metrics` says at one moment."""

    calls: dict[str, int]
    drops: dict[str, dict[str, int]]
    """By point, then by reason."""
    rows: int
    nobody: int
    """Of these, rows computed for nobody."""


class Outcome(msgspec.Struct):
    """One run: the generator's result, and the server's side of it."""

    name: str
    result: dict[str, Any]
    """Of `bench.load`."""
    load: dict[str, Any]
    """The phase that is measured, of the same."""
    callers: dict[str, int]
    server: dict[str, int]
    """Calls by word: what callers saw, what the server counted."""
    drops: dict[str, dict[str, int]]
    ledger: Ledger
    faults: tuple[str, ...]
    """Why it does not close; empty when it does."""
    server_cores: dict[str, float]
    """CPU seconds a second during the phase, by process."""
    others_cores: float
    """The same, of everything else on this machine."""
    private_mb: tuple[float, float]
    """Before and after."""
    rows: int
    nobody: int
    round: int = 0
    peak_per_s: float = 0.0
    back_to_normal_s: float | None = None
    """Since the load's end; None where no probes follow it, infinite when they stayed slow."""
    void: bool = False
    """Its P can't be right: the machine was disturbed while P was measured. No figure against P means anything."""

    @property
    def not_sent(self) -> int:
        """Calls whose deadline passed in the generator."""
        return int(self.result["total"]["outcomes"].get("not_sent", 0))

    @property
    def late_share(self) -> float:
        """Of the admitted calls, those without an answer in time: dropped on the way, computed for nobody, or late."""
        dropped = sum(sum(self.drops[point].values()) for point in POINTS if point != "admission")
        admitted = self.server.get(OK, 0) + dropped + self.nobody
        return 1 - self.result["total"]["outcomes"].get(OK, 0) / admitted if admitted else 0.0

    @property
    def goodput(self) -> float:
        """Answers in time a second, against the peak."""
        return float(self.load["goodput_per_s"]) / self.peak_per_s

    @property
    def nobody_share(self) -> float:
        """Of the computed rows, those for nobody."""
        return self.nobody / self.rows if self.rows else 0.0


class _Clocks(NamedTuple):
    """CPU seconds so far, by role."""

    server: dict[str, float]
    machine_s: float
    at_s: float

    @classmethod
    def read(cls, server: Contestant) -> "_Clocks":
        times = psutil.cpu_times()
        busy_s = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        return cls(cpu_s_by_role(server.process), busy_s, time.monotonic())


def closed(server: Contestant, in_flight: int, window_s: float) -> float:
    """Calls a second of a closed loop. Exits when any fails."""
    _, result = _generate(server, ["--in-flight", str(in_flight), "--window-s", str(window_s)])
    if result["errors"]:
        raise SystemExit(f"calls failed with {in_flight} in flight: {result['errors']}")
    return float(result["requests"] / result["window_s"])


def run(server: Contestant, name: str, arguments: Sequence[str], measured: int = 0) -> Outcome:
    """Run `bench.load` with these arguments; `measured` is the number of the phase that counts.

    When it is not the first, the phases before and after it are slow trickles, which tell the time back to normal.
    """
    memory_mb, before = private_mb(server.process), settled(server)
    with tempfile.NamedTemporaryFile(prefix="headrace-bench-", suffix=".csv") as records:
        clocks, result = _generate(server, [*arguments, "--records", records.name])
        calls = [line.split(",") for line in Path(records.name).read_text().splitlines()[1:]]
    after = settled(server)
    phase = result["phases"][measured]
    begin, end = clocks[measured], clocks[measured + 1]
    seconds = end.at_s - begin.at_s
    cores = {role: (spent - begin.server.get(role, 0.0)) / seconds for role, spent in end.server.items()}
    others = (end.machine_s - begin.machine_s) / seconds - sum(cores.values()) - phase["generator_cores"]
    callers = callers_words(result["total"]["outcomes"])
    counted = since(before.calls, after.calls)
    ledger = compare(callers, counted)
    drops = {point: dict(since(before.drops[point], after.drops[point])) for point in POINTS}
    return Outcome(
        name=name,
        result=result,
        load=phase,
        callers=dict(callers),
        server=dict(counted),
        drops=drops,
        ledger=ledger,
        faults=faults(result["total"], ledger),
        server_cores=cores,
        others_cores=max(0.0, others),
        private_mb=(memory_mb, private_mb(server.process)),
        rows=after.rows - before.rows,
        nobody=after.nobody - before.nobody,
        back_to_normal_s=back_to_normal_s(calls, measured) if measured else None,
    )


def _generate(server: Contestant, arguments: Sequence[str]) -> tuple[list[_Clocks], dict[str, Any]]:
    command = [sys.executable, "-m", "bench.load", "--json", "--address", server.address, *arguments]
    clocks: list[_Clocks] = []
    result: dict[str, Any] = {}
    # A session of its own, as a client would be.
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as load:
        try:
            for line in load.stdout or ():
                said = json.loads(line)
                if said["event"] == "result":
                    result = said
                else:
                    clocks.append(_Clocks.read(server))
        except KeyboardInterrupt:
            load.kill()
            raise
    if load.returncode or not result:
        raise SystemExit(f"the load generator failed (exit code {load.returncode}): {' '.join(arguments)}")
    return clocks, result


def faults(total: dict[str, Any], ledger: Ledger) -> tuple[str, ...]:
    """Everything that keeps the ledger from closing: the generator's own sum, then both sides against each other."""
    outcomes = total["outcomes"]
    found = []
    if sum(outcomes.values()) != total["planned"] or "" in outcomes:
        found.append(f"{total['planned']} calls were planned, but the outcomes are {outcomes}")
    return (*found, *ledger.faults)


def back_to_normal_s(calls: Sequence[Sequence[str]], measured: int) -> float:
    """From the load's end to the first probe from which WINDOW in a row are answered about as fast as before.

    `calls` are lines of the generator's records; infinite when that never happens.
    """
    before = sorted(float(ended) - float(planned) for phase, _, planned, _, ended, _ in calls if int(phase) < measured)
    after = [call for call in calls if int(call[0]) > measured]
    if not before or not after:
        raise ValueError("the load needs probes before and after it")
    limit_s, end_s = NORMAL * percentile(before, 0.5), float(after[0][2])
    for first in range(len(after) - WINDOW + 1):
        window = after[first : first + WINDOW]
        took = sorted(float(ended) - float(planned) for _, _, planned, _, ended, _ in window)
        if all(call[5] == OK for call in window) and percentile(took, 0.5) <= limit_s:
            return float(window[0][2]) - end_s
    return float("inf")


def mark_void(runs: Sequence[Outcome]) -> str:
    """Mark all runs of a round that share a measured P, when the one at twice P shows that it is too low; a sentence.

    Only the run by the same generator as P's can show it: one that needs less CPU leaves more to the server.
    """
    above = max((run.goodput for run in runs if run.name == "2x"), default=0.0)
    if above <= PLAUSIBLE:
        return ""
    for run in runs:
        run.void = True
    return (
        f"goodput at 2 P is {above:.2f} P: the machine was disturbed while P was measured "
        f"({runs[0].peak_per_s:.0f}/s); the figures of this round are void"
    )


def settled(server: Contestant) -> Counters:
    """The counters, once no call is in flight. Exits when one stays."""
    limit_s = time.monotonic() + SETTLE_LIMIT_S
    while True:
        text = _metrics(server)
        in_flight = [
            line
            for line in text.splitlines()
            if line.startswith(("headrace_calls_in_flight ", "headrace_calls_in_flight{"))
        ]
        if not sum(float(line.split()[-1]) for line in in_flight):
            break
        if time.monotonic() > limit_s:
            raise SystemExit(f"after {SETTLE_LIMIT_S:.0f} s without a caller the server still says: {in_flight}")
        time.sleep(STEP_S)
    rows, nobody = server_rows(text)
    drops = {point: dict(server_drops(text, point)) for point in POINTS}
    return Counters(dict(server_calls(text, METHOD)), drops, rows, nobody)


def _metrics(server: Contestant) -> str:
    with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=5.0) as answer:
        return str(answer.read().decode())
