"""`python -m workers`: settings, build, announce, loop. One process per device; `--index` numbers them."""

import argparse
import functools
import os
import sys
from pathlib import Path

from shared import logs, settings_loader
from shared.child import Announcer, StopSignal, add_child_arguments, bind_to_parent, collect_garbage_rarely, run_main
from shared.clock import now_s
from shared.devices import worker_count
from shared.errors import ExitCode
from shared.runtime_dir import RuntimeDir
from shared.settings import MAX_WORKERS, Settings
from workers import host, loading
from workers.backends.base import Device, DeviceLost, NoDevice
from workers.loader_thread import LoaderThread
from workers.loop import Worker
from workers.model_pool import ModelPool
from workers.pace import SWITCH_S, Pace

LOADER_LIMIT_S = 1.0
"""How long a stop waits for a load under way to come to the end of its present step."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers", description="The process that owns the device.")
    parser.add_argument("--config", type=Path, default=None, help="headrace.yaml (default: ./headrace.yaml if present)")
    parser.add_argument(
        "--index", type=_index, default=0, help="number of this worker, and of its CUDA device (default 0)"
    )
    add_child_arguments(parser)
    return parser.parse_args()


def _index(text: str) -> int:
    if not text.isdecimal() or int(text) >= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"must be 0..{MAX_WORKERS - 1}, not {text!r}")
    return int(text)


def threads_of(settings: Settings) -> int:
    """CPU threads of a forward pass: as set, else this worker's share of the cores."""
    return settings.worker.threads or max(1, host.cores() // worker_count(settings.worker))


def _device(settings: Settings, index: int) -> Device:
    """Torch's device, or none when no served model needs torch: then torch is never imported."""
    if not loading.needs_torch(settings):
        return NoDevice()
    threads = threads_of(settings)
    host.keep_batch_memory()
    host.prepare_threads(threads)
    # Only now: both calls above must come before torch is loaded. All of it, so that it counts as permanent.
    from workers.backends import torch_backend, torch_device  # noqa: F401, PLC0415

    return torch_device.find(settings.worker.device, index, threads)


def budget_of(settings: Settings, device: Device) -> int:
    """Bytes that models may take: as set, else a share of the device, or of a part of it where workers share it."""
    if settings.worker.memory_budget_bytes is not None:
        return settings.worker.memory_budget_bytes
    has_its_own = device.name.startswith("cuda") and ":" not in settings.worker.device
    return int(device.memory.total_bytes() * device.memory.share) // (
        1 if has_its_own else worker_count(settings.worker)
    )


def _pool(settings: Settings, device: Device, stop: StopSignal) -> ModelPool:
    """The models' pool, with what is loaded at the start on its way: ahead of the gateway, which asks for the same."""
    pace = Pace(now_s)
    collect_garbage_rarely()  # else each unloading would hold up the batches while all of torch is looked through
    sys.setswitchinterval(SWITCH_S)
    budget_bytes = budget_of(settings, device)
    loader = loading.Loader(settings, device, lambda: stop.requested, pace.give_way, budget_bytes)
    pool = ModelPool(LoaderThread(loader, device.memory, pace), budget_bytes, now_s)
    for key, config in loading.served(settings):
        pool.preload(key, config)
    return pool


def _run(arguments: argparse.Namespace, announcer: Announcer) -> int:
    bind_to_parent(arguments.parent_pid)
    name = f"worker-{arguments.index}"
    settings = settings_loader.load(arguments.config).settings
    logs.configure(name, settings.log)
    runtime = RuntimeDir.open(settings.runtime_dir)
    runtime.lock(name)
    with StopSignal(blocking=True) as stop:
        device = _device(settings, arguments.index)
        pool = _pool(settings, device, stop)
        sockets = [runtime.gateway_socket(index) for index in range(settings.gateway.processes)]
        worker = Worker(name, sockets, device, pool, stop)
        # Ready is who has done work: the supervisor gives up on a worker that never does.
        worker.worked = functools.cache(lambda: announcer.ready(name, f"{name} on {device.name}"))
        try:
            worker.run()
        except DeviceLost as lost:
            _leave(runtime, announcer, name, lost)
        if not pool.close(LOADER_LIMIT_S):
            _exit(runtime, ExitCode.OK)
    return ExitCode.OK


def _leave(runtime: RuntimeDir, announcer: Announcer, name: str, lost: DeviceLost) -> None:
    logs.get_logger().error("device lost", reason=str(lost), exit_code=int(ExitCode.DEVICE_LOST))
    announcer.failed(name, ExitCode.DEVICE_LOST, str(lost))
    _exit(runtime, ExitCode.DEVICE_LOST)


def _exit(runtime: RuntimeDir, code: ExitCode) -> None:
    """End at once: an interpreter's orderly end would wait for a device that is lost, or trip over a busy thread."""
    runtime.close()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    announcer = Announcer(arguments.ready_fd)
    run_main("worker", lambda: _run(arguments, announcer), announcer)


if __name__ == "__main__":
    main()
