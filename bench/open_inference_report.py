"""Rows → the printed tables, bench/results/open_inference.json and docs/benchmarks/open_inference.md."""

import json
from pathlib import Path
from typing import Any

from bench.processes import ALONE
from bench.report import CLIENT, Sample, machine_facts, plain, table

LIBRARIES = ("tritonclient", "grpcio", "protobuf", "fastapi", "uvicorn", "h11", "pyzmq", "numpy", "torch")
TITLES = {"grpc": "gRPC", "http": "HTTP", "echo": "plain grpc.aio"}
BY_HAND = "<!-- From here on written by hand; `make bench-open-inference` keeps it. -->"
_HEADINGS = {
    "identity": "identity: 16 floats in, 16 out",
    "identity_602k": "identity: 602 KB in, 602 KB out",
    "efficientnet-lite0": "efficientnet-lite0, float32 on the CPU: a 60 KB JPEG in, 10 classes out",
}


class Row(Sample, frozen=True):
    """One run of perf_analyzer. `name` is a key of TITLES, `kind` the model."""

    batch_rows: float = 0.0
    """Rows of an average batch; 0 where there are none."""
    others_cores: float = 0.0
    """CPU cores that processes which are no part of the run used meanwhile, on average."""


def write(rows: list[Row], facts: dict[str, Any], folder: Path | None) -> None:
    """Print the tables; with a folder (the root), also write the JSON and the page."""
    machine = machine_facts(LIBRARIES)
    models = dict.fromkeys(row.kind for row in rows)
    tables = "\n\n".join(_table([row for row in rows if row.kind == model], model) for model in models)
    print(tables)
    if folder is None:
        return
    content = {"run": facts, "machine": machine, "runs": plain(rows)}
    (folder / "bench" / "results" / "open_inference.json").write_text(json.dumps(content, indent=1) + "\n")
    page = folder / "docs" / "benchmarks" / "open_inference.md"
    kept = page.read_text().partition(BY_HAND)[2] if page.exists() else "\n"
    libraries = ", ".join(f"{name} {machine[name]}" for name in LIBRARIES)
    errors = sum(sum(row.errors.values()) for row in rows)
    text = _PAGE.format(tables=tables, libraries=libraries, errors=errors, **facts, **machine)
    page.write_text(text + BY_HAND + kept)


def _table(rows: list[Row], model: str) -> str:
    """One model."""
    roles = ["gateway", "pool", "worker", ALONE, CLIENT]
    columns = [role for role in roles if any(f"{row.cpu_ms.get(role, 0.0):.3f}" != "0.000" for row in rows)]
    header = ["", "in flight", "infer/s", "p50 ms", "p99 ms", "rows/batch", "CPU ms/req", *columns, "others"]
    lines = [
        [
            TITLES[row.name],
            str(row.in_flight),
            f"{row.requests_per_s:.0f}",
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.batch_rows:.1f}" if row.batch_rows else "",
            f"{row.server_cpu_ms:.3f}",
            *(f"{row.cpu_ms[role]:.3f}" if role in row.cpu_ms else "" for role in columns),
            f"{row.others_cores:.2f}",
        ]
        for row in rows
    ]
    return f"### {_HEADINGS.get(model, model)}\n\n{table(header, lines)}"


_PAGE = """# Open Inference Protocol: perf_analyzer against the whole server

Written by `{command}` in {seconds} s. Machine: {cores} cores ({cpu}), Linux {kernel}, Python {python}, {libraries}.
The load generator runs on the same cores.

perf_analyzer, as tritonclient {tritonclient} brings it, against `headrace serve` with default settings, once per line:

    {perf_analyzer}

with zeros as floats (its random bits would be denormals and NaNs, which cost a CPU more), and with the JPEG of
`bench/photo.py` as the classifier's image.

- **gRPC, HTTP**: ModelInfer, and `POST /v2/models/…/infer` with the binary tensor extension.
- **plain grpc.aio**: the same perf_analyzer, hence the same bytes in, against one process that parses nothing and sends
  the server's recorded answer, hence the same bytes out. What gRPC for Python costs by itself on this machine.
- **infer/s, p50, p99**: as perf_analyzer reports them, over {windows} windows of {window_ms} ms.
- **rows/batch**: by the server's statistics.
- **CPU ms/req**: user and system time of all server processes, and of each kind of process, per answered request;
  *load generator* is perf_analyzer's own. All of a run counts, from perf_analyzer's start to its end.
- **others**: how many cores processes that are no part of the run used meanwhile. A disturbed line is measured again
  while there is time, and the least disturbed run counts. The further from 0, the worse infer/s and the latencies are;
  CPU ms/req suffers less.

Failed requests in all runs: {errors}.

{tables}

"""
