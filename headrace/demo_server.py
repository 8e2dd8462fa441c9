"""The demo's own server: on free ports, with a runtime folder of its own, gone when the demo is over."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.client_calls import channel_options
from shared.errors import ExitCode, StartupError
from shared.settings_loader import variable_of

READY_LIMIT_S = 300
"""Importing torch, loading five models and warming them up on a slow, busy machine; usually half a minute."""
STOP_LIMIT_S = 15
"""More than `supervisor.stop_ms`, after which the supervisor kills what is left."""


@contextlib.contextmanager
def running(models: Sequence[str], repository: Path, config: Path | None) -> Iterator[str]:
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
            variable_of("repository"): str(repository.absolute()),
            variable_of("models"): ",".join(models),
        }
        command = [sys.executable, "-P", "-m", "headrace", "serve"]
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
