"""The real server for end-to-end tests: started as a user would, on free ports, in a throw-away folder.

Every wait has a limit and says what was awaited. `Stack` is `headrace serve`; `Process` is any one process by itself.
"""

import contextlib
import itertools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

from shared.repository import Meta
from shared.repository_writer import add_version

ROOT = Path(__file__).parent.parent.parent
START_LIMIT_S = 60.0
"""Importing torch on a cold disk takes seconds; everything else is far below."""
STOP_LIMIT_S = 20.0
"""A start that fails has imported everything first; a stop itself is bounded by `supervisor.stop_ms`."""
STEP_S = 0.02
"""Between looks at a thing that can't notify us (another process's state)."""

SIMULATED_MODEL = """\
pipeline: image_classification
backend: simulated
preprocessing:
  size: 224
  classes: 1000
"""


def eventually(what: str, condition: Callable[[], Any], limit_s: float = START_LIMIT_S) -> Any:  # noqa: ANN401 - whatever the condition gives
    """Look until `condition()` is true; fail with what was awaited."""
    until_s = time.monotonic() + limit_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > until_s:
            raise AssertionError(f"waited {limit_s} s for: {what}")
        threading.Event().wait(STEP_S)


_PORTS = range(10_000, 30_000)
"""Below those that the system gives to connections, which could take one between the look and the server's start."""
_next_port = itertools.count(os.getpid() * 1009)  # processes of tests that run side by side look in different places


def free_port() -> int:
    """A port that was free a moment ago."""
    for number in itertools.islice(_next_port, len(_PORTS)):
        port = _PORTS[number % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {_PORTS} is free")


def simulated_repository(root: Path, *names: str, a_ms: float = 2.0, b_ms: float = 0.05) -> Path:
    """A model repository of `simulated` classifiers."""
    root.mkdir(exist_ok=True)
    weights = root / "simulated.json"
    weights.write_text(json.dumps({"a_ms": a_ms, "b_ms": b_ms}))
    for name in names or ("sim",):
        (root / name).mkdir()
        (root / name / "model.yaml").write_text(SIMULATED_MODEL)
        add_version(root, name, {"simulated.json": weights}, Meta(source="test"), make_current=True, by="test")
    weights.unlink()
    return root


class Process:
    """One process of the server with its output."""

    def __init__(self, argv: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.popen = subprocess.Popen(
            argv,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.popen.pid

    def output(self) -> str:
        """All lines so far."""
        return "".join(self.lines)

    def wait_line(self, part: str, limit_s: float = START_LIMIT_S) -> str:
        """The next line that contains `part`."""
        until_s = time.monotonic() + limit_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"waited {limit_s} s for a line with {part!r}; output:\n{self.output()}") from None
            if line is None:
                raise AssertionError(f"ended (exit {self.popen.wait()}) before a line with {part!r}:\n{self.output()}")
            if part in line:
                return line

    def signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        self.popen.send_signal(number)

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        """Its exit code."""
        try:
            code = self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"waited {limit_s} s for process {self.pid} to end:\n{self.output()}") from None
        self._reader.join(limit_s)
        return code

    def close(self) -> None:
        """Kill what is left."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self._reader.join(STOP_LIMIT_S)
        if self.popen.stdout is not None:
            self.popen.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        for line in self.popen.stdout or ():
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)


class Site:
    """A folder with settings and free ports, in which processes of one server run."""

    def __init__(self, folder: Path, repository: Path, **groups: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.runtime = Path(tempfile.mkdtemp(prefix="headrace-test-")) / "run"  # a test's own folder is too deep
        self.grpc = f"127.0.0.1:{free_port()}"
        self.http = f"127.0.0.1:{free_port()}"
        gateway = {"grpc_address": self.grpc, "http_address": self.http, **groups.pop("gateway", {})}
        pool = {"processes": 2, **groups.pop("pool", {})}
        arena = {"budget_bytes": 64 * 1024 * 1024, **groups.pop("arena", {})}
        worker = {"count": 1, **groups.pop("worker", {})}  # on a machine with many devices, too
        settings = {
            "repository": str(repository),
            "runtime_dir": str(self.runtime),
            "gateway": gateway,
            "pool": pool,
            "arena": arena,
            "worker": worker,
            **groups,
        }
        self.config = folder / "headrace.yaml"
        self.config.write_text(json.dumps(settings))  # JSON is YAML

    def module(self, name: str, *extra: str) -> Process:
        """`python -m name --config …`."""
        return Process([sys.executable, "-m", name, "--config", str(self.config), *extra], self.folder)

    def serve(self) -> Process:
        """`headrace serve`."""
        return self.module_command("serve")

    def module_command(self, *command: str) -> Process:
        """`headrace COMMAND --config …`."""
        return Process([sys.executable, "-m", "headrace", *command, "--config", str(self.config)], self.folder)

    def get(self, path: str) -> tuple[int, str]:
        """One HTTP request: status and body; (0, "") when nobody listens."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready(self) -> bool:
        """Whether `/readyz` says so."""
        return self.get("/readyz")[0] == 200

    def debug(self) -> dict[str, Any]:
        """`/debug`; empty when nobody listens."""
        status, body = self.get("/debug")
        return dict(json.loads(body)) if status == 200 else {}

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Until every model can answer."""
        eventually(f"/readyz of {self.http} to say 200 (last: {self.get('/readyz')})", self.ready, limit_s)

    def pool_pids(self) -> list[int]:
        """Process ids of the pool, as the gateway sees it."""
        return [process["pid"] for process in self.debug().get("pool", []) if process["ready"]]

    def worker_pids(self) -> list[int]:
        """Process ids of connected workers."""
        return [worker["pid"] for worker in self.debug().get("workers", [])]

    def worker_pid(self, name: str) -> int:
        """Process id of a connected worker; 0 when it is not there."""
        return next((worker["pid"] for worker in self.debug().get("workers", []) if worker["worker"] == name), 0)

    def workers_with_models(self) -> int:
        """Connected workers that have loaded a model."""
        return sum(1 for worker in self.debug().get("workers", []) if worker["models"])

    def gateway_pid(self) -> int:
        """The process that holds the gateway's lock."""
        return int((self.runtime / "gateway.lock").read_text())

    def processes(self) -> list[psutil.Process]:
        """Every living process of this site, known by its settings file on the command line."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.config) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def wait_no_process(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Until nothing of this site is left in the process table."""
        eventually(
            f"no process of the site to be left, still: {[p.cmdline() for p in self.processes()]}",
            lambda: not self.processes(),
            limit_s,
        )

    def kill_all(self) -> None:
        """Clean up after a failed test."""
        for process in self.processes():
            with_signal(process.pid, signal.SIGKILL)
        shutil.rmtree(self.runtime.parent, ignore_errors=True)


def with_signal(pid: int, number: int) -> None:
    """Send a signal; a process that is gone is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@contextmanager
def serving(site: Site, limit_s: float = START_LIMIT_S) -> Iterator[Process]:
    """`headrace serve`, ready; everything is gone afterwards."""
    with site.serve() as process:
        try:
            process.wait_line("Headrace is ready", limit_s)
            yield process
            if process.popen.poll() is None:
                process.signal(signal.SIGINT)
                process.wait()
        finally:
            site.kill_all()
