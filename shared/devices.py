"""How many workers a machine should have, without asking torch: importing it takes seconds and hundreds of megabytes.

Used by the supervisor, which starts them, and by each worker, for its share of the CPU cores.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from shared.settings import MAX_WORKERS, WorkerSettings

PROC = Path("/proc/driver/nvidia/gpus")
DEV = Path("/dev")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def worker_count(worker: WorkerSettings, environ: Mapping[str, str] = os.environ) -> int:
    """`worker.count`, or its default: one per CUDA device that `worker.device: auto` or `cuda` may use, else one."""
    if worker.count is not None:
        return worker.count
    if worker.device not in {"auto", "cuda"}:  # the CPU, or one device by its number
        return 1
    return min(max(1, cuda_devices(environ)), MAX_WORKERS)


def cuda_devices(environ: Mapping[str, str] = os.environ, proc: Path = PROC, dev: Path = DEV) -> int:
    """CUDA devices that a process with this environment can use, by what the NVIDIA driver shows in the file system.

    The device files come first: a container has only those it was given, and may still see all of the machine's GPUs
    under /proc. 0 where the driver shows nothing of the kind, as under WSL: a worker may still find a device then.
    """
    present = sum(1 for path in dev.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdecimal())
    if not present and proc.is_dir():
        present = sum(1 for _ in proc.iterdir())
    visible = environ.get(VISIBLE)
    return present if visible is None else min(present, _visible(visible, present))


def _visible(text: str, present: int) -> int:
    """Entries of CUDA_VISIBLE_DEVICES that count: CUDA stops at the first that names no device, and none may repeat."""
    entries = [entry.strip() for entry in text.split(",")]
    if entries[0].startswith("MIG-"):
        return 1  # a process can use one slice at a time
    usable: list[str] = []
    for entry in entries:
        if entry in usable:
            return 0
        if not entry.startswith("GPU-") and not (entry.isdecimal() and int(entry) < present):
            break
        usable.append(entry)
    return len(usable)
