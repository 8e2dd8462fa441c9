"""What a process takes of its device's memory, and how to give back what it no longer needs. No torch."""

import abc
import contextlib
import ctypes
import gc
import os
from pathlib import Path

from shared import host_memory

_STATM = Path("/proc/self/statm")


class DeviceMemory(abc.ABC):
    """Called by the loader's thread; `used_bytes` by any."""

    share: float
    """What the models may have of it by default; the rest is for batches, and for others."""

    @abc.abstractmethod
    def total_bytes(self) -> int:
        """All there is."""

    @abc.abstractmethod
    def used_bytes(self) -> int:
        """What this process holds of it, as the system sees it."""

    @abc.abstractmethod
    def give_back(self) -> None:
        """Return to the system what nothing refers to any more."""


class HostMemory(DeviceMemory):
    """The machine's, or what its cgroup leaves of it."""

    share = 0.5

    def total_bytes(self) -> int:
        """See DeviceMemory."""
        return host_memory.total_bytes()

    def used_bytes(self) -> int:
        """Resident memory; 0 where the system doesn't say."""
        try:
            return int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return 0

    def give_back(self) -> None:
        """Networks are full of cycles, so they are collected; then the C library's free pages go back.

        It would keep them: `host.keep_batch_memory` tells it to, for the batches' sake. The next batch touches its
        pages anew.
        """
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
