"""The page of `bench.model_loads`: pure."""

import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from bench.report import machine_facts, table

RATIO, BACK_MB = 1.5, 50.0
"""What was promised: p99 beside loads against p99 alone, and memory above the baseline."""


class Round(NamedTuple):
    """One run: latencies in milliseconds, from the planned time to the answer."""

    alone_p50: float
    alone_p99: float
    loading_p50: float
    loading_p99: float
    failed: int
    """Live calls of the whole run that were not answered."""
    loads: int
    load_s: float
    """Of one load, the median."""

    @property
    def ratio(self) -> float:
        """p99 while versions load, against p99 alone."""
        return self.loading_p99 / self.alone_p99


class Memory(NamedTuple):
    """Private megabytes of all processes of a kind."""

    before: float
    after: float


def scheduling(autogroups: str, groups: str) -> str:
    """How the kernel shares the cores out: `autogroups` on or off, `groups` as in /proc/self/cgroup."""
    paths = [line.split(":", 2) for line in groups.splitlines()]
    own = any(path not in {"", "/"} for _, controllers, path in paths if {"", "cpu"} & set(controllers.split(",")))
    if own or autogroups == "off":
        return (
            "The run has a control group of its own, as in a container or service: priorities hold between processes."
        )
    return (
        "Scheduling autogroups are on: server and load generator are one session, in which priorities hold; what else\n"
        "the machine does competes with all of it together."
    )


def page(
    rounds: Sequence[Round], memory: Mapping[str, Mapping[str, Memory]], command: str, seconds: int, cores: str
) -> str:
    """All of it as markdown; `cores` is what `scheduling` says."""
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts(("torch", "grpcio")).items())
    ratios = sorted(each.ratio for each in rounds)
    return (
        "# Loading beside live traffic\n\n"
        f"Written by `{command}` in {seconds} s. Machine: {facts}. One-minute load when it ended: "
        f"{os.getloadavg()[0]:.1f}.\n{cores}\n\n"
        "Live: 500×375 JPEGs of 60 KB in an open loop, Poisson over 4 connections, to a simulated model of 2 ms +\n"
        "0.05 ms a row: gateway, pool and worker do all that they do for a real one. Beside it, in the second half of\n"
        "each run, new versions of efficientnet-lite0 come up in the same worker without a pause: read and verified,\n"
        "built, warmed at every batch size, proven by an image through all processes, switched to. Load generator,\n"
        "server and loads share the cores named above.\n\n"
        f"**p99 while versions load ÷ p99 alone: median {median(ratios):.2f}, range {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}** (promised: {RATIO:g}); {sum(each.failed for each in rounds)} calls failed.\n\n"
        + table(
            ["round", "alone p50 ms", "p99", "loading p50 ms", "p99", "p99 ratio", "failed", "loads", "s a load"],
            [_row(number, each) for number, each in enumerate(rounds, 1)],
        )
        + "\n"
        + _memory(memory)
    )


def _row(number: int, each: Round) -> list[str]:
    times = (each.alone_p50, each.alone_p99, each.loading_p50, each.loading_p99)
    return [
        str(number),
        *(f"{ms:.1f}" for ms in times),
        f"{each.ratio:.2f}",
        str(each.failed),
        str(each.loads),
        f"{each.load_s:.1f}",
    ]


def _memory(memory: Mapping[str, Mapping[str, Memory]]) -> str:
    if not memory:
        return ""
    rows = [
        [what, role, f"{each.before:.0f}", f"{each.after:.0f}", f"{each.after - each.before:+.0f}"]
        for what, roles in memory.items()
        for role, each in roles.items()
    ]
    return (
        "\n## Memory after many loads\n\n"
        "efficientnet-lite0 loaded and unloaded 50 times, then as often a model whose weights don't fit its network,\n"
        "each refused with a sentence. Memory that no other process shares, of all processes of a kind together,\n"
        f"after three repetitions and after fifty more (promised: back within {BACK_MB:g} MB).\n\n"
        + table(["", "process", "before MB", "after MB", "difference"], rows)
        + "\n"
    )
