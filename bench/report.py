"""Samples → medians → the printed table, bench/results/foundation.json and docs/benchmarks/foundation.md."""

import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.processes import ALONE

CLIENT = "load generator"
ROLES = ("gateway", "pool", "worker", "supervisor", ALONE, CLIENT)
LIBRARIES = ("grpcio", "protobuf", "pyzmq", "msgspec", "opencv-python-headless", "numpy", "torch")
TITLES = {
    "bare": "(a) bare loop",
    "echo": "(b) grpc.aio, same bytes back",
    "grpc": "(b) grpc.aio, an answer back",
    "headrace": "(c) headrace",
}
KINDS = ("simulated", "real")
_HEADINGS = {
    "simulated": "Simulated accelerator: 2 ms + 0.05 ms a row, no CPU",
    "real": "EfficientNet-Lite0, float32 on the CPU",
}


class Sample(msgspec.Struct, frozen=True):
    """One figure of one round, or the median of all rounds."""

    name: str
    """Key of TITLES."""
    kind: str
    """`simulated`, `real`, or empty where no model runs."""
    in_flight: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: dict[str, float]
    """CPU milliseconds per request, by role."""
    errors: dict[str, int] = {}
    rss_mb: float = 0.0
    start_s: float = 0.0

    @classmethod
    def of(cls, name: tuple[str, str], in_flight: int, result: dict[str, Any], cpu_s: dict[str, float]) -> "Sample":
        """Make one from what a load generator or the bare loop measured."""
        requests = result["requests"]
        cpu_ms = {role: seconds * 1e3 / max(requests, 1) for role, seconds in cpu_s.items()}
        rate = requests / result["window_s"]
        return cls(*name, in_flight, rate, result["p50_ms"], result["p99_ms"], cpu_ms, result.get("errors", {}))

    @property
    def server_cpu_ms(self) -> float:
        """All processes but the load generator."""
        return sum(value for role, value in self.cpu_ms.items() if role != CLIENT)


def medians(samples: Iterable[Sample]) -> list[Sample]:
    """One sample per contestant, kind and number in flight, in the order of first appearance."""
    groups: dict[tuple[str, str, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.name, sample.kind, sample.in_flight), []).append(sample)
    return [_median(group) for group in groups.values()]


def _median(group: list[Sample]) -> Sample:
    numbers = {
        field: median(getattr(sample, field) for sample in group)
        for field in ("requests_per_s", "p50_ms", "p99_ms", "rss_mb", "start_s")
    }
    roles = {role for sample in group for role in sample.cpu_ms}
    cpu_ms = {role: median(sample.cpu_ms.get(role, 0.0) for sample in group) for role in roles}
    errors: dict[str, int] = {}
    for sample in group:
        for code, count in sample.errors.items():
            errors[code] = errors.get(code, 0) + count
    return msgspec.structs.replace(group[0], **numbers, cpu_ms=cpu_ms, errors=errors)


def write(found: list[Sample], samples: list[Sample], facts: dict[str, Any], folder: Path | None) -> None:
    """Print the tables; with a folder (the root), also write the JSON and the page."""
    machine = machine_facts()
    tables = "\n\n".join(filter(None, (_main_table(found, kind) for kind in KINDS)))
    added = _added_table(found)
    print(f"{tables}\n\n{added}")
    if folder is None:
        return
    results = folder / "bench" / "results" / "foundation.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    content = {"run": facts, "machine": machine, "medians": plain(found), "rounds": plain(samples)}
    results.write_text(json.dumps(content, indent=1) + "\n")
    page = folder / "docs" / "benchmarks" / "foundation.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(tables, added, facts, machine))


def machine_facts(libraries: Sequence[str] = LIBRARIES) -> dict[str, Any]:
    """What the figures depend on, with the versions of these libraries; no names."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu[1] if cpu else platform.machine(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
    }


def plain(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """For JSON, rounded."""

    def rounded(value: object) -> object:
        if isinstance(value, dict):
            return {key: rounded(inner) for key, inner in value.items()}
        return round(value, 4) if isinstance(value, float) else value

    return [{key: rounded(value) for key, value in msgspec.structs.asdict(sample).items()} for sample in samples]


def _main_table(found: list[Sample], kind: str) -> str:
    """The bare loop, plain gRPC (in the first table only: no model runs in it) and the server."""
    wanted = [sample for sample in found if sample.kind == kind or (not sample.kind and kind == KINDS[0])]
    if not any(sample.kind for sample in wanted):
        return ""
    columns = [role for role in ROLES if any(sample.cpu_ms.get(role) for sample in wanted)]
    header = ["", "in flight", "req/s", "p50 ms", "p99 ms", "CPU ms/req", *columns]
    rows = [
        [
            TITLES[sample.name],
            str(sample.in_flight),
            f"{sample.requests_per_s:.0f}",
            f"{sample.p50_ms:.1f}",
            f"{sample.p99_ms:.1f}",
            f"{sample.server_cpu_ms:.2f}",
            *(f"{sample.cpu_ms[role]:.2f}" if role in sample.cpu_ms else "" for role in columns),
        ]
        for sample in wanted
    ]
    return f"### {_HEADINGS[kind]}\n\n{table(header, rows)}"


def _added_table(found: list[Sample]) -> str:
    """What (c) costs above (a) + (b), in CPU and, one call at a time, in latency."""
    by_key = {(sample.name, sample.kind, sample.in_flight): sample for sample in found}
    rows = []
    for (name, kind, in_flight), server in by_key.items():
        bare, grpc = by_key.get(("bare", kind, in_flight)), by_key.get(("grpc", "", in_flight))
        if name != "headrace" or bare is None or grpc is None:
            continue
        gateway = server.cpu_ms.get("gateway", 0.0) - grpc.server_cpu_ms
        rest = server.server_cpu_ms - server.cpu_ms.get("gateway", 0.0) - bare.server_cpu_ms
        cpu = [server.server_cpu_ms, bare.server_cpu_ms, grpc.server_cpu_ms, gateway + rest, gateway, rest]
        latency = f"{server.p50_ms - bare.p50_ms - grpc.p50_ms:.2f}" if in_flight == 1 else ""
        rows.append([kind, str(in_flight), *(f"{value:.2f}" for value in cpu), latency])
    header = [
        "CPU ms/req",
        "in flight",
        "(c)",
        "(a)",
        "(b)",
        "(c)-(a)-(b)",
        "in the gateway",
        "in pool + worker",
        "p50 ms",
    ]
    return f"### What the server adds to (a) + (b)\n\n{table(header, rows)}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """As markdown that is readable as it is, numbers to the right."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *rest = cells
        padded = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), f"|{'|'.join(rule)}|", *(line(row) for row in rows)])


def _page(tables: str, added: str, facts: dict[str, Any], machine: dict[str, Any]) -> str:
    libraries = ", ".join(f"{name} {machine[name]}" for name in LIBRARIES)
    return _PAGE.format(tables=tables, added=added, libraries=libraries, **facts, **machine)


_PAGE = """# Foundation: the server beside the bare loop and plain gRPC

Written by `{command}` in {seconds} s. Every figure is the median of {rounds} interleaved rounds, which are all in
`bench/results/foundation.json`. Machine: {cores} cores ({cpu}), Linux {kernel}, Python {python}, {libraries}.
The load generator runs on the same cores; its CPU is counted apart.

- **(a) bare loop**: decode + resize + batched forward, one process, no server, with the server's own decoding and
  network. In flight is the batch size here (at most 32), p50 and p99 are a batch's.
- **(b) grpc.aio**: one process that takes the same request bytes and parses nothing. *Same bytes back* is a true
  echo; *an answer back* sends what a server has to send, and is the one to compare with.
- **(c) headrace**: `headrace serve` with default settings; CPU by process over the whole process tree.

One 500×375 JPEG of 60 KB, from a closed loop of 1, 16 and 64 unary calls in flight.

{tables}

{added}

*In the gateway* is the gateway's CPU above (b); *in pool + worker* is theirs (and the supervisor's) above (a). *p50 ms*
is (c) - (a) - (b) with one call in flight.
"""
