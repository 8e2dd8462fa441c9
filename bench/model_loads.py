"""`make bench-loads`: what callers notice while another version loads, and what memory is left after many loads.

The first part sends JPEGs to a simulated model in an open loop, first alone, then while new versions of a real network
come up one after another in the same worker: read, built, warmed at every size, proven, switched to. The figure is the
p99 of the second phase divided by that of the first, in the same run. The second part loads and unloads the network,
and one that can't be loaded, many times over.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.contestants import ROOT, real_repository
from bench.model_loads_report import Memory, Round, page, scheduling
from bench.overload import autogroups
from bench.processes import role_of
from headrace.admin_client import AdminClient
from shared.errors import HeadraceError
from shared.repository import Meta
from shared.repository_writer import add_version
from shared.settings_loader import load
from tests.support.stack import Site, eventually, serving
from tests.support.stack import simulated_repository as simulated

PAGE = ROOT / "docs" / "benchmarks" / "model-loads.md"
MODEL, LIVE, BROKEN = "efficientnet-lite0", "live", "broken"
VERSIONS = 4
"""In turn: the two latest are current and standby, so the next one is never loaded already."""
RATE, SECONDS = 100.0, 20.0
REPEATS = 50
WARM_REPEATS = 3
"""Of the second part, before memory counts: the first loads import torch's parts and fill its pools."""


def main() -> None:
    """Run both parts, print the page, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=RATE, help="live requests a second (default: %(default)g)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each phase (default: %(default)g)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of the second part (default: %(default)s)")
    parser.add_argument("--no-write", action="store_true", help="only print")
    given = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        repository, versions = _repository(Path(name))
        with _server(Path(name, "site"), repository) as site:
            rounds = [_round(site, versions, given.rate, given.seconds) for _ in range(given.rounds)]
        memory = {}
        if given.repeats:
            with _server(Path(name, "again"), repository) as site, _admin(site) as admin:
                memory = {
                    "loads": _memory(site, admin, lambda: _load_and_unload(admin), given.repeats),
                    "failed loads": _memory(site, admin, lambda: _fail(admin), given.repeats),
                }
    command = f"python -m bench.model_loads {' '.join(sys.argv[1:])}".strip() if sys.argv[1:] else "make bench-loads"
    groups = Path("/proc/self/cgroup").read_text()
    text = page(rounds, memory, command, round(time.monotonic() - started_s), scheduling(autogroups(), groups))
    print(text)
    if not given.no_write:
        PAGE.write_text(text)


def _repository(folder: Path) -> tuple[Path, list[str]]:
    """The live model, the real one in several versions, and one whose weights don't fit; and these versions."""
    from safetensors.numpy import load_file, save_file  # noqa: PLC0415 - only here

    repository = real_repository(folder, MODEL)
    simulated(repository, LIVE)
    config = repository / MODEL / "model.yaml"  # else it is proven every five seconds also in the first phase
    config.write_text(config.read_text() + "load: on_demand\n")
    (weights_file,) = (repository / MODEL / "versions").glob("*/*.safetensors")
    labels = weights_file.parent / "labels.txt"
    weights, versions = load_file(weights_file), [weights_file.parent.name]
    name = next(name for name in weights if name.endswith("bias"))
    for _ in range(VERSIONS - 1):
        weights[name] = weights[name] * 1.0001  # as little as makes another version
        file = folder / weights_file.name
        save_file(weights, file)
        files = {weights_file.name: file, labels.name: labels}
        versions.append(add_version(repository, MODEL, files, Meta(source="bench")).version)
    shutil.copytree(repository / MODEL, repository / BROKEN, ignore=shutil.ignore_patterns("versions", "traffic.json"))
    del weights[name]
    save_file(weights, file)
    add_version(repository, BROKEN, files, Meta(source="bench"), make_current=True)
    return repository, versions


@contextmanager
def _server(folder: Path, repository: Path) -> Iterator[Site]:
    site = Site(folder, repository, models=[LIVE, MODEL])  # type: ignore[arg-type]  # a list is a setting, too
    with serving(site):
        yield site


@contextmanager
def _admin(site: Site) -> Iterator[AdminClient]:
    with AdminClient.connect(load(site.config).settings) as admin:
        yield admin


# ---------------------------------------------------------------- live traffic beside loads


class _Loads:
    """Switches to one version after another until it is told to stop."""

    def __init__(self, site: Site, versions: list[str]) -> None:
        self._site = site
        self._versions = versions
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The load under way ends by itself."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with _admin(self._site) as admin:
            traffic = admin.traffic(MODEL).traffic
            while not self._stop.is_set():
                used = {traffic.current, traffic.standby}
                version = next(each for each in self._versions if each not in used)
                self._versions.remove(version)
                self._versions.append(version)
                began_s = time.monotonic()
                try:
                    traffic = admin.switch(MODEL, version)
                except HeadraceError as error:
                    self.failures.append(error.text)
                    return
                self.seconds.append(time.monotonic() - began_s)


def _round(site: Site, versions: list[str], rate: float, seconds: float) -> Round:
    """Both phases by one run of the load generator."""
    phase = f"poisson:rate={rate:g},seconds={seconds:g}"
    command = [sys.executable, "-m", "bench.load", "--json", "--address", site.grpc, "--model", LIVE]
    command += ["--phase", f"poisson:rate={rate:g},seconds=2", "--phase", phase, "--phase", phase]
    command += ["--deadline-ms", "5000", "--channels", "4"]
    loads, begun = _Loads(site, versions), 0
    result: dict[str, Any] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as generator:
        for line in generator.stdout or ():
            said = json.loads(line)
            if said["event"] == "result":
                result = said
                continue
            begun += 1
            if begun == 3:
                loads.start()
    if begun >= 3:
        loads.stop()
    if generator.returncode or not result or loads.failures:
        raise SystemExit(f"a round failed (exit code {generator.returncode}): {loads.failures}")
    _, before, during = result["phases"]
    failed = sum(count for word, count in result["total"]["outcomes"].items() if word != "ok")
    return Round(
        before["ok_ms"]["p50"],
        before["ok_ms"]["p99"],
        during["ok_ms"]["p50"],
        during["ok_ms"]["p99"],
        failed,
        len(loads.seconds),
        median(loads.seconds),
    )


# ---------------------------------------------------------------- memory after many loads


def _memory(site: Site, admin: AdminClient, once: Callable[[], None], repeats: int) -> dict[str, Memory]:
    """By what a process is: private memory in MB before and after, of all processes of that kind together."""
    for _ in range(WARM_REPEATS):
        once()
    before = _private_mb(site, admin)
    for _ in range(repeats):
        once()
    after = _private_mb(site, admin)
    return {role: Memory(before[role], after[role]) for role in before}


def _private_mb(site: Site, admin: AdminClient) -> dict[str, float]:
    """Once the worker has said that the last version is gone: it gives memory back behind the batches."""
    eventually("the worker to hold no model", lambda: not sum(each.models_bytes for each in admin.models().memory))
    found: dict[str, float] = {}
    for process in site.processes():
        role, memory = _role(process), process.memory_info()
        found[role] = found.get(role, 0.0) + (memory.rss - memory.shared) / 1e6
    return found


def _role(process: psutil.Process) -> str:
    return role_of(process.cmdline())


def _load_and_unload(admin: AdminClient) -> None:
    admin.load(MODEL)
    admin.unload(MODEL)


def _fail(admin: AdminClient) -> None:
    try:
        admin.load(BROKEN)
    except HeadraceError:
        admin.unload(BROKEN)
        return
    raise SystemExit(f"{BROKEN} was loaded, although its weights don't fit")


if __name__ == "__main__":
    main()
