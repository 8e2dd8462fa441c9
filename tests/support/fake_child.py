"""A process that behaves like one of ours, for tests of whoever supervises it.

    python -m tests.support.fake_child NAME [--log FILE] [--fail CODE] [--stubborn] [--silent] [--raises]

It announces ready with its pid as detail, then waits for a stop. `--log` notes its end, `--fail` ends the start with
that exit code, `--stubborn` ignores SIGTERM, `--silent` never says ready, `--raises` has a bug.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import NoReturn

from shared.child import Announcer, StopSignal, add_child_arguments, bind_to_parent, run_main
from shared.errors import ExitCode, StartupError


def main() -> NoReturn:
    """Run one fake process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--fail", type=int)
    for flag in ("--stubborn", "--silent", "--raises"):
        parser.add_argument(flag, action="store_true")
    add_child_arguments(parser)
    arguments = parser.parse_args()
    announcer = Announcer(arguments.ready_fd)
    run_main(arguments.name, lambda: _body(arguments, announcer), announcer)


def _body(arguments: argparse.Namespace, announcer: Announcer) -> int:
    bind_to_parent(arguments.parent_pid)
    if arguments.raises:
        raise RuntimeError("a bug")
    if arguments.fail is not None:
        raise StartupError(ExitCode(arguments.fail), f"{arguments.name} can't start")
    with StopSignal() as stop:
        if not arguments.silent:
            announcer.ready(arguments.name, str(os.getpid()))
        while not stop.wait(60.0) or arguments.stubborn:
            if arguments.stubborn:
                signal.pause()
    if arguments.log is not None:
        with arguments.log.open("a") as log:
            log.write(f"{arguments.name}\n")
    return 0


if __name__ == "__main__":
    main()
