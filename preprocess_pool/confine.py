"""What a pool process must not be able to do, since it runs decoders over strangers' bytes."""

import faulthandler
import os
import resource
import sys
import time

from shared.child import keep_freed_memory, limit_address_space
from shared.settings import PoolSettings

_REUSED_BLOCK = 32 << 20
"""Bytes: an image of 11 megapixels. The most that glibc takes for this value."""
_REUSED_HEAP = 64 << 20
"""Bytes that a process keeps though nothing is in them."""


def confine(settings: PoolSettings) -> None:
    """Load the decoders and close the doors behind them: no GPU, no core dump, bounded pixels and memory.

    Called once, before the first job. The memory limit counts from here, so everything heavy is loaded first.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A second line of defence behind our own look at the header: OpenCV reads these when it is first imported.
    os.environ["OPENCV_IO_MAX_IMAGE_PIXELS"] = str(settings.max_pixels)
    os.environ["OPENCV_LOG_LEVEL"] = "SILENT"
    from shared import images  # noqa: PLC0415 - imports OpenCV, which reads the environment set above

    images.configure(settings.max_pixels)
    # A decoder that crashes would otherwise leave a caller's image on the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_address_space(settings.memory_bytes)


class CpuLimit:
    """CPU seconds of one job, counted by the kernel: it ends the process (SIGXCPU) even if the gateway is stuck itself.

    RLIMIT_CPU counts a process's whole life, so it is set anew for each job: 1 µs. The margin leaves the first word to
    the gateway, which kills at `pool.job_limit_ms` of real time and can then tell the caller why.
    """

    MARGIN_S = 2.0

    def __init__(self, job_limit_ms: float) -> None:
        self._allowed_s = job_limit_ms / 1000 + self.MARGIN_S
        self._hard = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def job(self) -> None:
        """A job starts."""
        self._set(int(time.process_time() + self._allowed_s) + 1)  # the kernel counts whole seconds

    def lift(self) -> None:
        """What comes next may take as long as it needs: a pipeline is built."""
        self._set(self._hard)

    def _set(self, soft: int) -> None:
        if self._hard != resource.RLIM_INFINITY:
            soft = min(soft, self._hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, self._hard))


def keep_image_memory() -> None:
    """By default each photo of 500 × 375 pixels costs 240 page faults, 0.4 ms of the 1.1 that it takes.

    What one very large image needed still goes back.
    """
    keep_freed_memory(_REUSED_BLOCK, _REUSED_HEAP)


def hide_native_messages() -> None:
    """Close stderr for the C libraries, which print a line over every broken image; Python keeps it.

    When a decoder crashes, the Python stack is still written.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    faulthandler.enable(sys.stderr)
