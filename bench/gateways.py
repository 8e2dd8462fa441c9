"""What several gateway processes cost and give: CPU a request by process, at one offered rate over sixteen connections.

    python -m bench.gateways [--rate 150] [--seconds 6] [--processes 1 2 4]

Open loop, 500×375 JPEGs, a simulated model of 2 ms + 0.05 ms a row. The rate is offered, not reached: CPU seconds a
request are steady also on a machine that does other things.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from bench.processes import cpu_s_by_role
from tests.support.stack import Site, serving, simulated_repository

_CONNECTIONS = 16
_ROLES = ("gateway", "pool", "worker", "supervisor")


def _measured(site: Site, rate: float, seconds: float) -> dict[str, Any]:
    """One phase against a running server: its line of JSON, with the CPU milliseconds a request by role."""
    with serving(site) as server:
        root = psutil.Process(server.pid)
        _offer(site, rate, 1.0)
        before = cpu_s_by_role(root)
        result = _offer(site, rate, seconds)
        after = cpu_s_by_role(root)
    return {**result, "cpu_ms": {role: (after[role] - before[role]) * 1e3 / result["planned"] for role in _ROLES}}


def _offer(site: Site, rate: float, seconds: float) -> dict[str, Any]:
    """An open-loop phase; its ledger."""
    command = [sys.executable, "-m", "bench.load", "--json", "--address", site.grpc, "--model", "sim"]
    command += ["--channels", str(_CONNECTIONS), "--phase", f"poisson:rate={rate:g},seconds={seconds:g}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1])["total"])


def main() -> None:
    """Measure each number of gateways and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, default=150.0, help="requests a second (default: %(default)g)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase (default: %(default)g)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    asked = parser.parse_args()
    print(f"{'gateways':>8} {'ok':>6} {'p50 ms':>7} {'p99 ms':>7} " + " ".join(f"{role:>10}" for role in _ROLES))
    with tempfile.TemporaryDirectory() as folder:
        repository = simulated_repository(Path(folder) / "models")
        for count in asked.processes:
            gateway = {"processes": count, "max_message_bytes": 4 << 20}
            site = Site(Path(folder) / str(count), repository, gateway=gateway, pool={"processes": 2})
            with contextlib.ExitStack() as stack:
                stack.callback(site.kill_all)
                found = _measured(site, asked.rate, asked.seconds)
            cpu = " ".join(f"{found['cpu_ms'][role]:10.2f}" for role in _ROLES)
            spent = found["ok_ms"]
            print(f"{count:8} {found['outcomes'].get('ok', 0):6} {spent['p50']:7.1f} {spent['p99']:7.1f} {cpu}")


if __name__ == "__main__":
    main()
