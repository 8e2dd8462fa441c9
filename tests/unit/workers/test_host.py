import os
import subprocess
import sys
from pathlib import Path

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


def test_memory_is_the_machines_or_its_cgroups_if_that_is_less(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroup / "box/inner").mkdir(parents=True)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.memory_bytes(proc, cgroup) == whole
    (proc / "self/cgroup").write_text("0::/box/inner\n")
    (cgroup / "box/inner/memory.max").write_text("max\n")
    assert host.memory_bytes(proc, cgroup) == whole
    (cgroup / "box/memory.max").write_text("4096000\n")
    assert host.memory_bytes(proc, cgroup) == 4_096_000
    (cgroup / "memory").mkdir()
    (cgroup / "memory/memory.limit_in_bytes").write_text("1024000\n")
    assert host.memory_bytes(proc, cgroup) == 1_024_000
