"""An admin service that can't be reached: one sentence that says why."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace.admin_client import AdminClient
from shared.errors import ExitCode, StartupError
from tests.support.fake_admin import AdminThread, admin_settings
from tests.support.stack import ROOT, eventually

HOLDER = """
import sys, time
from pathlib import Path
from shared.runtime_dir import RuntimeDir
runtime = RuntimeDir.open(Path(sys.argv[1]))
runtime.lock("gateway")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_gateway_that_is_stopped_is_told_from_one_that_starts(root: Path, runtime_dir: Path) -> None:
    argv = [sys.executable, "-c", HOLDER, str(runtime_dir)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StartupError, match="is starting or stopping and takes no orders now"):
            AdminClient.connect(admin_settings(root, runtime_dir))
        os.kill(holder.pid, signal.SIGSTOP)
        process = psutil.Process(holder.pid)
        eventually("it to be stopped", lambda: process.status() == psutil.STATUS_STOPPED, 10.0)
        with pytest.raises(
            StartupError, match=f"gateway is stopped and answers nobody: `kill -CONT {holder.pid}`"
        ) as told:
            AdminClient.connect(admin_settings(root, runtime_dir))
        assert told.value.exit_code == ExitCode.PEER_LOST
        os.kill(holder.pid, signal.SIGCONT)
        holder.communicate(timeout=10)


def test_a_handshake_that_fails_is_one_sentence_and_no_line_of_the_library(
    over_tcp: AdminThread, token_file: Path, tmp_path: Path
) -> None:
    address = f"localhost:{over_tcp.running.port}"  # its certificate is signed by nobody that the system trusts
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "models", "status", "-a", address, "--token-file", token_file],
        cwd=tmp_path,
        env={**{name: value for name, value in os.environ.items() if "GRPC" not in name}, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.PEER_LOST
    assert done.stderr.startswith(f"headrace: no admin service answers at {address}")
    assert len(done.stderr.splitlines()) == 1, done.stderr
