"""Open loop: sends each call at its planned time, whether or not earlier ones were answered. One process.

Every call has what is left of its deadline, counted from the planned time: a generator that falls behind makes nothing
look better. It costs as little as it can, since it shares the machine with what it measures: one pump that sends
whatever is due, nothing parsed, nothing kept but a few numbers for each call.
"""

import asyncio
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.arrivals import Phase, boundaries, plan, weighted
from bench.grpc_wire import GrpcWire
from bench.http2_wire import Http2Wire
from bench.ledger import OK
from bench.records import LATE, NOT_SENT, Records, stages, summary
from bench.wire import Ended, Target, Wire

AT_ONCE = 64
"""Calls sent before answers get their turn, when the generator is behind."""
START_S = 0.05
"""Between the first look at the clock and the first call."""
GRACE_S = 5.0
"""After the last deadline: every call has ended by itself long before."""
WIRES: dict[str, Callable[[Target, Ended], Wire]] = {"grpc": GrpcWire, "http2": Http2Wire}
_OURS = {NOT_SENT: "its deadline had passed before it could be sent", LATE: "answered after its deadline"}
"""Why a call ended in a word that is the generator's alone."""

Say = Callable[..., None]
"""Prints one line of JSON; called with its fields."""
Show = Callable[[int, int], None]
"""Shows progress: calls sent, calls ended."""


class Load(NamedTuple):
    """What one process does."""

    address: str
    method: str
    payloads: dict[str, bytes]
    """Serialised requests by the name of their size."""
    weights: dict[str, float]
    phases: tuple[Phase, ...]
    deadline_s: float
    channels: int = 1
    """Connections."""
    seed: int = 1
    stages: bool = False
    """Keep the time in each stage that the server names with an answer; costs a little more CPU a call."""
    wire: str = "grpc"
    """Key of WIRES."""


class Sender:
    """One run. The event loop's thread only."""

    def __init__(self, load: Load) -> None:
        arrivals = plan(load.phases, load.seed)
        sizes = weighted(load.weights, len(arrivals), load.seed)
        self.records = Records([a.planned_s for a in arrivals], [a.phase for a in arrivals], sizes)
        self.ended = 0
        self.sent = 0
        self._load = load
        self._start_s = 0.0
        self._all_ended = asyncio.Event()
        self._samples: dict[str, str] = {}
        self._timings: dict[int, str] = {}
        """The server's `server-timing`, by the call's place in the plan."""

    async def run(self, say: Say, show: Show | None = None) -> dict[str, Any]:
        """Send the plan and wait for the last answer. Raises NotThere, and TimeoutError when a call never ends."""
        load, records = self._load, self.records
        wire = WIRES[load.wire](Target(load.address, load.method, load.channels, load.stages), self._done)
        try:
            await wire.open()
            gc.collect()
            gc.freeze()
            gc.disable()  # a pause of the collector would look like one of the server
            self._start_s = time.monotonic() + START_S
            clocks = asyncio.create_task(self._say_phases(say))
            shown = asyncio.create_task(self._show(show)) if show else None
            await self._pump(wire)
            async with asyncio.timeout(load.deadline_s + GRACE_S):
                await self._all_ended.wait()
            cpu_s = await clocks
            if shown:
                shown.cancel()
        finally:
            gc.enable()
            gc.unfreeze()
            await wire.close()
        records.mark_late(load.deadline_s)
        self._samples = _OURS | wire.samples
        return self._result(cpu_s)

    async def _pump(self, wire: Wire) -> None:
        planned, sizes, payloads = self.records.planned_s, self.records.sizes, self._load.payloads
        start_s, deadline_s, count = self._start_s, self._load.deadline_s, len(planned)
        sent_s, clock, index = self.records.sent_s, time.monotonic, 0
        while index < count:
            now_s = clock() - start_s
            last = min(index + AT_ONCE, count)
            while index < last and planned[index] <= now_s:
                sent_s[index] = now_s = clock() - start_s
                left_s = planned[index] + deadline_s - now_s
                if left_s > 0:
                    wire.send(index, payloads[sizes[index]], left_s)
                else:
                    self._ended(index, NOT_SENT)
                index += 1
            self.sent = index
            await asyncio.sleep(max(0.0, planned[index] - (clock() - start_s)) if index < count else 0.0)
        if not count:
            self._all_ended.set()

    def _done(self, index: int, outcome: str, timing: str) -> None:
        if timing:
            self._timings[index] = timing
        self._ended(index, outcome)

    def _ended(self, index: int, outcome: str) -> None:
        self.records.ended_s[index] = time.monotonic() - self._start_s
        self.records.outcomes[index] = outcome
        self.ended += 1
        if self.ended == len(self.records):
            self._all_ended.set()

    async def _say_phases(self, say: Say) -> list[float]:
        """Say each phase's begin and the end, so that a parent reads the server's clocks there; our CPU at each."""
        cpu_s = []
        for number, begin_s in enumerate(boundaries(self._load.phases)):
            await asyncio.sleep(max(0.0, self._start_s + begin_s - time.monotonic()))
            cpu_s.append(time.process_time())
            say(event="phase" if number < len(self._load.phases) else "end", number=number)
        await self._all_ended.wait()
        cpu_s.append(time.process_time())
        return cpu_s

    async def _show(self, show: Show) -> None:
        while True:
            show(self.sent, self.ended)
            await asyncio.sleep(0.5)

    def _result(self, cpu_s: list[float]) -> dict[str, Any]:
        load, records = self._load, self.records
        spent_s = [after - before for before, after in itertools.pairwise(cpu_s)]
        total = summary(records, range(len(records)))
        return {
            "deadline_ms": load.deadline_s * 1e3,
            "seed": load.seed,
            "phases": [self._phase(number, phase, spent_s[number]) for number, phase in enumerate(load.phases)],
            "sizes": {size: summary(records, records.where(size=size)) for size in load.payloads},
            "total": total,
            "samples": {word: self._samples[word] for word in total["outcomes"] if word in self._samples},
            "cpu_ms_per_call": round((cpu_s[-1] - cpu_s[0]) * 1e3 / max(1, self.sent), 4),
        }

    def _phase(self, number: int, phase: Phase, spent_s: float) -> dict[str, Any]:
        """The ledger of one phase; `spent_s` is our own CPU meanwhile."""
        places = self.records.where(phase=number)
        found: dict[str, Any] = {"name": phase.name or f"{phase.kind} {phase.rate:g}/s", "seconds": phase.seconds}
        found |= summary(self.records, places)
        if self._load.stages:
            found["stages_ms"] = stages(self._timings[index] for index in places if index in self._timings)
        of_a_second = {
            "offered_per_s": len(places),
            "goodput_per_s": found["outcomes"].get(OK, 0),
            "generator_cores": spent_s,
        }
        if phase.seconds:
            found |= {name: round(amount / phase.seconds, 3) for name, amount in of_a_second.items()}
        return found
