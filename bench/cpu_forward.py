"""Milliseconds per row of EfficientNet-Lite0 on this CPU at every batch size, as the worker's settings are added.

    python bench/cpu_forward.py            print the tables
    python bench/cpu_forward.py --write    and put them into docs/benchmarks/cpu_forward.md
    python bench/cpu_forward.py --compile  measure torch.compile too (needs a C++ compiler, takes a minute)

Allocator and OpenMP settings belong to a process, so each contestant runs in one of its own. They take turns in several
rounds, and the best time of each counts: what disturbs on a shared machine only ever adds. Weights are random, which
changes no time.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workers import host  # noqa: E402 - after the path, and without torch

SIZES = (1, 2, 4, 8, 16, 32)
ROUNDS = 3
SECONDS_PER_SIZE = 0.6
RESULT = ROOT / "docs" / "benchmarks" / "cpu_forward.md"

CONTESTANTS = {
    "plain": "plain eager PyTorch",
    "memory": "+ malloc keeps freed memory",
    "layout": "+ channels_last",
    "graph": "+ absorbed norms, activations, padding; packed weights (**the worker**)",
}
COMPILED = {"compile": "torch.compile instead of the last step"}

Timing = dict[str, tuple[float, float]]
"""Batch size → milliseconds per row: wall clock, CPU."""


def measure(contestant: str, threads: int) -> Timing:
    """Run one contestant in this process, which must not have imported torch yet."""
    if contestant != "plain":
        host.keep_batch_memory()
        host.prepare_threads(threads)
    import torch  # noqa: PLC0415 - only after the settings above

    from workers.backends import cpu_graph  # noqa: PLC0415 - as above
    from workers.networks.efficientnet_lite import efficientnet_lite0  # noqa: PLC0415 - as above

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    network = efficientnet_lite0().eval().requires_grad_(requires_grad=False)
    layout = torch.contiguous_format if contestant in {"plain", "memory"} else torch.channels_last
    network.to(memory_format=layout)  # type: ignore[call-overload]  # missing in torch's overloads
    forward: Callable[[torch.Tensor], torch.Tensor] = network
    if contestant == "graph":
        forward = cpu_graph.optimise(network) or network
    elif contestant == "compile":
        forward = torch.compile(network, dynamic=False)
    times = {}
    with torch.inference_mode():
        for rows in SIZES:
            batch = (torch.rand(rows, 3, 224, 224) * 2 - 1).contiguous(memory_format=layout)
            times[str(rows)] = _best(forward, batch, rows)
    return times


def _best(forward: Callable[..., object], batch: object, rows: int) -> tuple[float, float]:
    forward(batch)
    best_wall = best_cpu = float("inf")
    until, passes = time.perf_counter() + SECONDS_PER_SIZE, 0
    while passes < 3 or time.perf_counter() < until:
        wall, cpu = time.perf_counter(), time.process_time()
        forward(batch)
        best_wall = min(best_wall, time.perf_counter() - wall)
        best_cpu = min(best_cpu, time.process_time() - cpu)
        passes += 1
    return best_wall * 1e3 / rows, best_cpu * 1e3 / rows


def compare(contestants: dict[str, str], threads: int) -> dict[str, Timing]:
    """Best of several rounds of all contestants, each in a fresh process."""
    best: dict[str, Timing] = {}
    for _ in range(ROUNDS):
        for contestant in contestants:
            argv = [sys.executable, __file__, "--one", contestant, "--threads", str(threads)]
            environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
            done = subprocess.run(argv, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            now: Timing = json.loads(done.stdout)
            before = best.setdefault(contestant, now)
            best[contestant] = {
                rows: (min(before[rows][0], now[rows][0]), min(before[rows][1], now[rows][1])) for rows in now
            }
    return best


def table(contestants: dict[str, str], threads: int) -> str:
    """One Markdown table: wall-clock milliseconds per row, CPU in brackets."""
    results = compare(contestants, threads)
    lines = [
        f"### {threads} thread{'s' if threads > 1 else ''}",
        "",
        "| ms a row: wall (CPU) at batch | " + " | ".join(map(str, SIZES)) + " |",
        "| --- |" + " --- |" * len(SIZES),
    ]
    for contestant, words in contestants.items():
        cells = [f"{wall:.1f} ({cpu:.1f})" for wall, cpu in results[contestant].values()]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    plain, ours = results["plain"], results["graph"]
    ratios = [f"{plain[str(rows)][0] / ours[str(rows)][0]:.2f} ×" for rows in SIZES]
    lines.append("| plain ÷ the worker | " + " | ".join(ratios) + " |")
    eager = results["layout"]
    ratios = [f"{eager[str(rows)][0] / ours[str(rows)][0]:.2f} ×" for rows in SIZES]
    lines.append("| well-set eager (third line) ÷ the worker | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def machine() -> str:
    """What the numbers belong to."""
    import torch  # noqa: PLC0415 - the parent process measures nothing

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return (
        f"{host.cores()} cores ({model}), {platform.libc_ver()[0]} {platform.libc_ver()[1]}, torch {torch.__version__}"
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the tables into {RESULT.relative_to(ROOT)}")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too")
    parser.add_argument("--one", choices=[*CONTESTANTS, *COMPILED], help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.threads)))
        return
    contestants = CONTESTANTS | (COMPILED if arguments.compile else {})
    tables = [table(contestants, threads) for threads in sorted({1, host.cores()})]
    text = "\n\n".join([f"Measured on {machine()}, best of {ROUNDS} rounds.", *tables]) + "\n"
    print(text)
    if arguments.write:
        before = RESULT.read_text(encoding="utf-8").partition("## Results")[0] if RESULT.exists() else ""
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(f"{before}## Results\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
