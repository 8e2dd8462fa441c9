"""The page of `bench.tasks`: pure."""

import os
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from bench.report import machine_facts, table


class Round(NamedTuple):
    """One task in one round: answers a second, and milliseconds."""

    task: str
    bare: float
    served: float
    p50_ms: float
    p99_ms: float

    @property
    def ratio(self) -> float:
        """Server ÷ bare loop."""
        return self.served / self.bare


class Mixed(NamedTuple):
    """One task while all others are asked, too."""

    task: str
    rate: float
    p50_ms: float
    p99_ms: float


def page(rounds: Sequence[Round], mixed: Sequence[Mixed], command: str, seconds: int) -> str:
    """All of it as markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts(("torch", "grpcio")).items())
    return (
        "# Every task beside the bare loop of its model\n\n"
        f"Written by `{command}` in {seconds} s. Machine: {facts}. One-minute load when it ended: "
        f"{os.getloadavg()[0]:.1f}.\n\n"
        "The bare loop is one process that prepares, runs and reads batches of 8, in float32 on the CPU, and does\n"
        "nothing else. The server is asked by 32 callers at once, whose generator takes its part of the same cores:\n"
        "on a machine without an accelerator the ratio is what all of serving leaves of them. Both in turn in each\n"
        "round. A photo of 512 × 512 pixels is classified; in a picture of 810 × 1080 objects are detected; the text\n"
        "has 17 words. Text that grows is on [its own page](generation.md).\n\n"
        f"{_alone(rounds)}\n\n"
        "## All at once\n\n"
        "One worker, one budget of memory, 8 callers for each task and 2 for text, every answer of which is checked.\n"
        "*Share*: the rate beside the rate alone. Equal weights should give each task about the same share of the\n"
        "worker.\n\n"
        f"{_together(rounds, mixed)}\n"
    )


def _alone(rounds: Sequence[Round]) -> str:
    lines = []
    for task in dict.fromkeys(each.task for each in rounds):
        mine = [each for each in rounds if each.task == task]
        ratios = sorted(each.ratio for each in mine)
        lines.append(
            [
                task,
                f"{median(each.bare for each in mine):.1f}",
                f"{median(each.served for each in mine):.1f}",
                f"{median(ratios):.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                f"{median(each.p50_ms for each in mine):.0f}",
                f"{median(each.p99_ms for each in mine):.0f}",
            ]
        )
    return table(["task", "bare loop, a second", "server", "ratio", "rounds", "p50 ms", "p99 ms"], lines)


def _together(rounds: Sequence[Round], mixed: Sequence[Mixed]) -> str:
    alone = {each.task: median(one.served for one in rounds if one.task == each.task) for each in rounds}
    return table(
        ["task", "a second", "share", "p50 ms", "p99 ms"],
        [
            [
                each.task,
                f"{each.rate:.1f}",
                f"{each.rate / alone[each.task]:.2f}" if each.task in alone else "",
                f"{each.p50_ms:.0f}",
                f"{each.p99_ms:.0f}",
            ]
            for each in mixed
        ],
    )
