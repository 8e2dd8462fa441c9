"""The page of `bench.generation`: pure."""

import os
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from bench.report import machine_facts, table


class Run(NamedTuple):
    """One round with one number of texts at a time: tokens a second, and seconds to the first token of a text."""

    sequences: int
    bare: float
    bare_first_s: float
    served: float
    served_first_s: float

    @property
    def ratio(self) -> float:
        """Server ÷ bare loop."""
        return self.served / self.bare


def page(runs: Sequence[Run], tokens: int, command: str, seconds: int) -> str:
    """All of it as markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts(("torch", "grpcio")).items())
    return (
        "# Generated text beside the bare loop\n\n"
        f"Written by `{command}` in {seconds} s. Machine: {facts}. One-minute load when it ended: "
        f"{os.getloadavg()[0]:.1f}.\n\n"
        f"SmolLM2-135M in float32 on the CPU: prompts of about twenty tokens, {tokens} tokens added to each, the\n"
        "likeliest one each time. The bare loop is one process that reads all prompts together and does nothing else;\n"
        "the server answers one streaming call per text, begun at the same moment, and its client shares the cores.\n"
        "Both in turn in each round, so that the ratio is of the same minute.\n\n"
        f"{_summary(runs)}\n\n{_rounds(runs)}\n\n"
        "What this is for: small models beside other tasks, on one machine, with one way to ask for everything. The\n"
        "cache is contiguous and each step runs in float32. For large language models use a server made for them,\n"
        "such as vLLM: paged caches, low precision and many GPUs are its trade.\n"
    )


def _summary(runs: Sequence[Run]) -> str:
    rows = []
    for sequences in sorted({run.sequences for run in runs}):
        mine = [run for run in runs if run.sequences == sequences]
        ratios = sorted(run.ratio for run in mine)
        rows.append(
            [
                f"{sequences}",
                f"{median(run.bare for run in mine):.0f}",
                f"{median(run.served for run in mine):.0f}",
                f"{median(ratios):.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                f"{median(run.bare_first_s for run in mine) * 1e3:.0f}",
                f"{median(run.served_first_s for run in mine) * 1e3:.0f}",
            ]
        )
    header = [
        "texts at a time",
        "bare tokens/s",
        "server tokens/s",
        "ratio",
        "range",
        "bare first ms",
        "server first ms",
    ]
    return table(header, rows)


def _rounds(runs: Sequence[Run]) -> str:
    rows = [
        [f"{number}", f"{run.sequences}", f"{run.bare:.0f}", f"{run.served:.0f}", f"{run.ratio:.2f}"]
        for number, run in enumerate(runs, 1)
    ]
    return table(["run", "texts", "bare tokens/s", "server tokens/s", "ratio"], rows)
