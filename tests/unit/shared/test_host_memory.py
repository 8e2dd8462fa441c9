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
