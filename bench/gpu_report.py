"""Figures of `make bench-gpu` → the printed tables, bench/results/gpu.json and docs/benchmarks/gpu.md."""

import json
from pathlib import Path
from typing import Any

from bench.gpu_facts import agreement

NOT_RUN = "It has not been run yet: no machine with a GPU was at hand."


def tables(loops: list[dict[str, Any]], served: list[dict[str, Any]], facts: str) -> str:
    """All of the report's tables; `loops` as `bench.gpu_loop` prints them, `served` as `bench.gpu` measures."""
    parts = [
        f"{facts}",
        "",
        "### Without a server",
        "",
        *_loops(loops),
        "",
        "### FP16 beside FP32",
        "",
        *_precisions(loops),
    ]
    return "\n".join([*parts, "", "### Through the server", "", *_served(served, loops)]) + "\n"


def _loops(loops: list[dict[str, Any]]) -> list[str]:
    lines = _head(
        ("network", "precision", "graphs"),
        (
            "rows",
            "plain loop, images/s",
            "worker's runner, images/s",
            "ratio",
            "device idle",
            "copies hidden",
            "p99 ms",
        ),
    )
    for loop in loops:
        for rows, got in loop["sizes"].items():
            ratio = got["worker_per_s"] / got["plain_per_s"]
            graphs = "yes" if int(rows) in loop["graphs"] else "no"
            lines.append(
                f"| {loop['model']} | {loop['precision']} | {graphs} | {rows} | {got['plain_per_s']:,.0f} "
                f"| {got['worker_per_s']:,.0f} | {ratio:.2f} × | {got['idle']:.1%} | {got['overlap']:.0%} "
                f"| {got['p99_ms']:.2f} |"
            )
    return lines


def _precisions(loops: list[dict[str, Any]]) -> list[str]:
    lines = _head(
        ("network",),
        ("rows", "FP16 ÷ FP32, images/s", "weights, graphs, MB: FP16, FP32", "peak, MB: FP16, FP32", "same class"),
    )
    whole = {(loop["model"], loop["precision"]): loop for loop in reversed(loops)}
    for (model, precision), half in whole.items():
        full = whole.get((model, "fp32"))
        if precision != "fp16" or full is None:
            continue
        same = agreement(half["classes"], full["classes"])
        for rows, got in half["sizes"].items():
            faster = got["worker_per_s"] / full["sizes"][rows]["worker_per_s"]
            lines.append(
                f"| {model} | {rows} | {faster:.2f} × | {_mb(half, 'memory_bytes')}, {_mb(full, 'memory_bytes')} "
                f"| {_mb(half, 'peak_bytes')}, {_mb(full, 'peak_bytes')} | {same:.1%} |"
            )
    return lines


def _head(words: tuple[str, ...], numbers: tuple[str, ...]) -> list[str]:
    """The first two lines of a table."""
    rule = " --- |" * len(words) + " ---: |" * len(numbers)
    return [f"| {' | '.join((*words, *numbers))} |", f"|{rule}"]


def _mb(loop: dict[str, Any], key: str) -> str:
    return f"{loop[key] / 1e6:,.0f}"


def _served(served: list[dict[str, Any]], loops: list[dict[str, Any]]) -> list[str]:
    lines = _head(
        ("network", "input"),
        ("in flight", "images/s", "of the plain loop", "device idle", "p50 ms", "p99 ms", "rows a batch"),
    )
    for one in served:
        best = max(
            (got["plain_per_s"] for loop in loops if loop["model"] == one["like"] for got in loop["sizes"].values()),
            default=0.0,
        )
        share = f"{one['images_per_s'] / best:.0%}" if best else "–"
        lines.append(
            f"| {one['like']} | {one['input']} | {one['in_flight']} | {one['images_per_s']:,.0f} | {share} "
            f"| {1 - one['busy']:.1%} | {one['p50_ms']:.1f} | {one['p99_ms']:.1f} | {one['batch_rows']:.1f} |"
        )
    return lines


def write(root: Path, text: str, found: dict[str, Any]) -> None:
    """Both files. The page keeps what people wrote above its results."""
    (root / "bench" / "results" / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = root / "docs" / "benchmarks" / "gpu.md"
    above = page.read_text(encoding="utf-8").partition("## Results")[0].replace(NOT_RUN, "").rstrip()
    page.write_text(f"{above}\n\n## Results\n\n{text}", encoding="utf-8")
