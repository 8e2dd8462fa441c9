"""`headrace demo`: 20 real photos through the whole server, each answer beside the truth."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace import zoo
from headrace.client import Client
from headrace.client_calls import channel_options
from headrace.client_errors import InferenceError
from headrace.client_results import Classified, Outcome
from headrace.many_inputs import reason_of
from headrace.output import literal
from headrace.zoo import Photo
from shared.errors import ExitCode, StartupError
from shared.settings_loader import load, variable_of

ENOUGH = 17
"""Right top-1 answers of 20. Two of the photos carry labels that every known model contradicts."""
READY_LIMIT_S = 120
"""Importing torch, loading and warming up on a slow, busy machine; usually a few seconds."""
STOP_LIMIT_S = 15
"""More than `supervisor.stop_ms`, after which the supervisor kills what is left."""


def run(address: str | None, config: Path | None) -> int:
    """Fetch what is missing, start a server (or use the one at `address`), classify, print. Returns 0 or 1."""
    console = Console()
    repository = load(config).settings.repository
    with console.status("fetching the model and the photos") as status:

        def show(text: str) -> None:
            status.update(literal(text))

        version = zoo.fetch(zoo.DEFAULT_MODEL, repository, show)
        photos = zoo.fetch_photos(repository, show)
    with contextlib.ExitStack() as stack:
        with console.status("starting the server"):
            started_s = time.monotonic()
            used = address or stack.enter_context(_server(config))
        if address is None:
            console.print(f"server ready after {time.monotonic() - started_s:.1f} s on {used}", highlight=False)
        started_s = time.monotonic()
        outcomes = _classify(used, photos)
        elapsed_s = time.monotonic() - started_s
    return report(console, photos, outcomes, version.labels(), elapsed_s)


def _classify(address: str, photos: list[Photo]) -> list[Outcome[Classified]]:
    """One outcome per photo, in order. Raises StartupError when there is no server."""
    with Client(address) as client:
        try:
            found = list(client.classify_many([photo.path for photo in photos], top_k=5, model=zoo.DEFAULT_MODEL))
        except InferenceError as error:
            raise StartupError(ExitCode.PEER_LOST, f"demo: {reason_of(error)}") from error
    return sorted(found, key=lambda outcome: outcome.index)


def report(
    console: Console,
    photos: list[Photo],
    outcomes: list[Outcome[Classified]],
    labels: tuple[str, ...],
    elapsed_s: float,
) -> int:
    """Print the table and the sum. Returns 0 when at least `ENOUGH` top-1 answers are right, else 1."""
    wide = console.width >= 120
    table = Table(box=SIMPLE_HEAD, title="ImageNet photos; times in ms", title_justify="left", padding=(0, 1, 0, 0))
    for heading in ("photo", "true label", "top-1", "top-5"):
        table.add_column(heading, overflow="fold")
    for heading in ("prepare", "queue", "run", "rows"):
        table.add_column(heading, justify="right")
    first_right = among_five = 0
    for photo, outcome in zip(photos, outcomes, strict=True):
        number = photo.path.stem.split("_")[1]
        truth = labels[photo.label] if photo.label < len(labels) else str(photo.label)
        if outcome.result is None:
            table.add_row(number, literal(truth), literal(f"✗ {reason_of(outcome.error)}", "red"))
            continue
        indices = [label.index for label in outcome.result.labels]
        first_right += indices[0] == photo.label
        among_five += photo.label in indices
        answer = _answer(outcome.result, photo.label, wide=wide)
        table.add_row(number, literal(truth), *answer, *_times(outcome.result))
    console.print(table)
    good = first_right >= ENOUGH
    console.print(
        Text("✓ " if good else "✗ ", style="green" if good else "red"),
        f"top-1 {first_right} of {len(photos)} right ({ENOUGH} are enough), top-5 {among_five}; "
        f"{len(photos)} photos in {elapsed_s:.2f} s",
        sep="",
        highlight=False,
    )
    return 0 if good else 1


def _answer(result: Classified, truth: int, *, wide: bool) -> tuple[Text, Text]:
    """The cells for top-1 and top-5: the best class where it is wrong, and at which place the true one is."""
    indices = [label.index for label in result.labels]
    score = f"{result.top.score * 100:.0f} %"
    right = result.top.index == truth
    first = f"{score}" if right and not wide else f"{result.top.name} {score}"
    place = f"{indices.index(truth) + 1}." if truth in indices else ""
    names = ", ".join(label.name for label in result.labels[1:]) if wide else ""
    return _marked(first, good=right), _marked(f"{place} {names}".strip(), good=truth in indices)


def _times(result: Classified) -> tuple[str, str, str, str]:
    """Milliseconds to prepare, to wait for a process, slot or company, to run; and the rows of the batch."""
    timing = result.server_timing
    queue_ms = timing.admit_ms + timing.wait_ms + timing.batch_ms
    run_ms = timing.copy_ms + timing.run_ms + timing.finish_ms
    return f"{timing.prepare_ms:.1f}", f"{queue_ms:.1f}", f"{run_ms:.1f}", str(timing.batch_rows)


def _marked(text: str, *, good: bool) -> Text:
    return literal(f"{'✓' if good else '✗'} {text}".strip(), "green" if good else "red")


@contextlib.contextmanager
def _server(config: Path | None) -> Iterator[str]:
    """A server of its own on free ports, with a runtime folder of its own; stopped in order at the end.

    Yields the gRPC address. Raises StartupError with the end of the server's log when it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        address = f"127.0.0.1:{_free_port()}"
        environ = {
            **os.environ,
            variable_of("gateway.grpc_address"): address,
            variable_of("gateway.http_address"): "127.0.0.1:0",
            variable_of("runtime_dir"): folder + "/run",
            variable_of("models"): zoo.DEFAULT_MODEL,
        }
        command = [sys.executable, "-m", "headrace", "serve"]
        if config is not None:
            command += ["--config", str(config)]
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603 - fixed words
        try:
            _await_ready(server, address, log)
            yield address
        finally:
            _stop(server)


def _free_port() -> int:
    """A port that nobody listens on now. Somebody could take it before the server does: then the demo says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Follow the health service until it says SERVING; the end of the process ends the wait at once."""
    quick = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
    with grpc.insecure_channel(address, options=[*channel_options(address), *quick]) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=READY_LIMIT_S, wait_for_ready=True
        )

        def cancel_at_exit() -> None:
            server.wait()
            watch.cancel()

        threading.Thread(target=cancel_at_exit, name="demo-server-exit", daemon=True).start()
        try:
            for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError:
            pass  # time-out or cancelled: told below, with the server's own words
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    code = server.poll()
    if code == 0:
        raise StartupError(ExitCode.PEER_LOST, "demo: the server was stopped before it was ready")
    what = f"was not ready in {READY_LIMIT_S} s" if code is None else f"ended with exit code {code}"
    raise StartupError(ExitCode.PEER_LOST if code is None else _exit_code(code), f"demo: the server {what}\n{tail}")


def _exit_code(code: int) -> ExitCode:
    try:
        return ExitCode(code)
    except ValueError:
        return ExitCode.INTERNAL


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is not None:
        return
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
