"""Settings of the C library and OpenMP that decide how fast a CPU forward pass is. Worker only.

To be called before torch is imported: the allocator must not have given memory back yet, and OpenMP reads its
environment once, when it is loaded.
"""

import os

from shared.child import keep_freed_memory, limit_library_threads

_NEVER = 2**31 - 1
_LARGE = 1 << 30


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


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
