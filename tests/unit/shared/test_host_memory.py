import os
from pathlib import Path

import pytest

from shared import host_memory


def test_this_machine_says_how_much_it_has() -> None:
    available = host_memory.available_bytes()
    assert available is not None
    assert available > 0


def test_a_cgroup_limit_counts_without_its_file_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 400\n")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert host_memory.available_bytes() == 700


def test_an_unlimited_cgroup_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    available = host_memory.available_bytes()
    assert available is not None
    assert available > 1000


def test_all_there_is_is_the_machines_or_its_cgroups_if_that_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    monkeypatch.setattr(host_memory, "_PROC", proc)
    monkeypatch.setattr(host_memory, "_CGROUP", cgroup)
    (proc / "self").mkdir(parents=True)
    (cgroup / "box/inner").mkdir(parents=True)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory.total_bytes() == whole
    (proc / "self/cgroup").write_text("0::/box/inner\n")
    (cgroup / "box/inner/memory.max").write_text("max\n")
    assert host_memory.total_bytes() == whole
    (cgroup / "box/memory.max").write_text("4096000\n")
    assert host_memory.total_bytes() == 4_096_000
    (cgroup / "memory").mkdir()
    (cgroup / "memory/memory.limit_in_bytes").write_text("1024000\n")
    assert host_memory.total_bytes() == 1_024_000
