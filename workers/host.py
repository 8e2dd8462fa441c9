"""Settings of the C library and OpenMP that decide how fast a CPU forward pass is. Worker only.

To be called before torch is imported: the allocator must not have given memory back yet, and OpenMP reads its
environment once, when it is loaded.
"""

import contextlib
import ctypes
import os

from shared.child import limit_library_threads

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_NEVER = 2**31 - 1
_LARGE = 1 << 30


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def keep_freed_memory() -> None:
    """Let malloc reuse large blocks instead of returning them to the kernel after every layer.

    By default glibc maps a block of over 32 MB anew each time and unmaps it when it is freed, and trims the heap's top:
    a batch of 32 images then spends most of its time on page faults (docs/benchmarks/cpu_forward.md). The price: the
    process keeps the memory of its largest batch. Does nothing with a C library that has no mallopt.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(_M_ARENA_MAX, 1)  # or the thread that warms up and the one that runs would each keep their own


def prepare_threads(threads: int) -> None:
    """`threads` per forward pass, which sleep while they wait for each other.

    OpenMP's threads spin by default. Next to the gateway and the pool, which use the same cores, a spinning thread
    keeps the core from the very thread it waits for: measured, single batches of 0.8 s instead of 10 ms.
    """
    limit_library_threads(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
