"""How much memory there is for this process, and how much it may still take, by the machine and by its cgroup.

Used by the gateway before it allocates the arena: asking first gives a sentence to read, where the kernel would kill.
And by workers, whose models may have a share of all there is.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Bytes that can be had without swapping; the smallest of all limits; None where the system doesn't say."""
    limits = [found for found in (_machine(), _cgroup_v2(), _cgroup_v1()) if found is not None]
    return min(limits, default=None)


def total_bytes() -> int:
    """Memory of this machine, or of the cgroup that this process is in, if that has less."""
    limits = [_number(folder / "memory.max") for folder in _folders()]
    limits.append(_number(_CGROUP / "memory" / "memory.limit_in_bytes"))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(limit for limit in limits if limit is not None)])


def _machine() -> int | None:
    for line in _lines(_PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _folders() -> Iterator[Path]:
    """Of this process's cgroup, second version, and of those around it, each of which may have a limit."""
    own = next((line[3:].strip("/") for line in _lines(_PROC / "self/cgroup") if line.startswith("0::")), "")
    folder = _CGROUP / own
    while folder.is_relative_to(_CGROUP):
        yield folder
        folder = folder.parent


def _cgroup_v2() -> int | None:
    rooms = [_room(folder, "memory.max", "memory.current", "inactive_file") for folder in _folders()]
    return min((room for room in rooms if room is not None), default=None)


def _cgroup_v1() -> int | None:
    return _room(_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit = _number(folder / limit_name)
    usage = _number(folder / usage_name)
    if limit is None or usage is None:
        return None
    # The file cache counts as used but is given up at need.
    cache = next((int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[0] == cache_name), 0)
    return max(0, limit - max(0, usage - cache))


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return []
