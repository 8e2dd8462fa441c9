import os
import subprocess
import sys

import pytest

from workers import host

PROBE = """
import ctypes, mmap, sys
from workers import host
host.keep_batch_memory()
host.prepare_threads(3)
import os
print(os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
"""


def test_a_fresh_process_gets_both_settings_and_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split() == ["3", "PASSIVE", "False"]


def test_a_users_own_wait_policy_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    host.prepare_threads(1)
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_cores_are_those_this_process_may_use() -> None:
    assert 1 <= host.cores() <= (os.cpu_count() or 1)
