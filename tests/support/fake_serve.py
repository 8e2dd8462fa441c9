"""A supervisor over fake children, as a process of its own: `python -m tests.support.fake_serve FOLDER [GATEWAY-ARGS]`.

Prints `ready NAME PID` for each child that is ready. FOLDER/log gets the order in which the children stopped.
"""

import asyncio
import sys
from pathlib import Path

from headrace.supervisor import Command, Supervisor
from shared.child import StopSignal
from shared.settings import SupervisorSettings

FAKE = (sys.executable, "-m", "tests.support.fake_child")


def commands(folder: Path, *gateway_arguments: str) -> list[Command]:
    """A gateway and a worker that note their end in `folder`/log."""
    log = ("--log", str(folder / "log"))
    return [
        Command("gateway", [*FAKE, "gateway", *log, *gateway_arguments], 0),
        Command("worker-0", [*FAKE, "worker-0", *log], 1),
    ]


def _say(name: str, detail: str, _first: bool) -> None:
    sys.stdout.write(f"ready {name} {detail}\n")
    sys.stdout.flush()


async def _main() -> int:
    with StopSignal() as stop:
        kept = commands(Path(sys.argv[1]), *sys.argv[2:])
        return int(await Supervisor(kept, SupervisorSettings(), stop, _say).run())


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
