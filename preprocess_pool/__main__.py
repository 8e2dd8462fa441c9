"""PROCESS: one of the pool's. Started by its gateway only, `python -m preprocess_pool …`.

settings → confine → arena and channel → loop. Never imports torch, never sees a GPU.
"""

import argparse
import functools
import os
from pathlib import Path

from preprocess_pool import loop
from preprocess_pool.confine import CpuLimit, confine, hide_native_messages, keep_image_memory
from preprocess_pool.stage import Stage
from shared import logs
from shared.arena import AttachedArena
from shared.child import StopSignal, add_child_arguments, bind_to_parent, give_way, run_main
from shared.errors import ExitCode, StartupError
from shared.messages import FromPool, ToPool
from shared.repository import Repository
from shared.settings_loader import load
from shared.transport import Dealer

_HIGH_WATER_MARK = 64
"""Messages queued per direction: two jobs, and the OpenPipeline of every served model at start."""


def main() -> None:
    """Run the process until Stop, a signal, or the gateway's end."""
    arguments = _parse()
    run_main("pool", functools.partial(_run, arguments))


def _run(arguments: argparse.Namespace) -> int:
    bind_to_parent(arguments.parent_pid)
    settings = load(arguments.config).settings
    hide_native_messages()
    logs.configure(arguments.identity, settings.log)
    with StopSignal(blocking=True) as stop:
        arena = _attach(arguments.arena_fd, arguments.arena_bytes)
        repository = Repository(settings.repository)
        give_way(settings.pool.nice)
        keep_image_memory()
        confine(settings.pool)
        dealer: Dealer[ToPool, FromPool] = Dealer(
            arguments.endpoint,
            ToPool,
            identity=arguments.identity.encode(),
            generation=arguments.generation,
            high_water_mark=_HIGH_WATER_MARK,
        )
        try:
            return loop.serve(dealer, Stage(arena, repository), stop, CpuLimit(settings.pool.job_limit_ms))
        finally:
            dealer.close()
            arena.close()


def _attach(fd: int, nbytes: int) -> AttachedArena:
    try:
        arena = AttachedArena.attach(fd, nbytes)
    except (OSError, ValueError) as error:
        raise StartupError(ExitCode.BAD_SETTINGS, f"--arena-fd {fd} is not the gateway's arena: {error}") from error
    os.close(fd)
    return arena


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m preprocess_pool", description="Started by the gateway only.")
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--arena-fd", type=int, required=True)
    parser.add_argument("--arena-bytes", type=int, required=True)
    add_child_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
