"""Settings of the C library and OpenMP that decide how fast a CPU forward pass is. Worker only.

To be called before torch is imported: the allocator must not have given memory back yet, and OpenMP reads its
environment once, when it is loaded.
"""

import os
from pathlib import Path

from shared.child import keep_freed_memory, limit_library_threads

_NEVER = 2**31 - 1
_LARGE = 1 << 30


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of this machine, or of the cgroup that this process is in, if that has less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _limit(cgroup / "memory/memory.limit_in_bytes")]
    own = next((line[3:].strip("/") for line in _lines(proc / "self/cgroup") if line.startswith("0::")), "")
    folder = cgroup / own
    while folder.is_relative_to(cgroup):
        limits.append(_limit(folder / "memory.max"))
        folder = folder.parent
    return min(limit for limit in limits if limit is not None)


def _limit(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return []


def keep_batch_memory() -> None:
    """Without it a batch of 32 images spends most of its time on page faults (docs/benchmarks/cpu_forward.md).

    The price: the process keeps the memory of its largest batch. One arena, or the thread that warms up and the one
    that runs would each keep their own.
    """
    keep_freed_memory(_LARGE, _NEVER, one_arena=True)


def prepare_threads(threads: int) -> None:
    """`threads` per forward pass, which sleep while they wait for each other.

    OpenMP's threads spin by default. Next to the gateway and the pool, which use the same cores, a spinning thread
    keeps the core from the very thread it waits for: measured, single batches of 0.8 s instead of 10 ms.
    """
    limit_library_threads(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
