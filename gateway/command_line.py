"""What the gateway process is told when it is started: by a person, or by the supervisor (options without a help)."""

import argparse
from pathlib import Path
from typing import NamedTuple

from shared.child import add_child_arguments
from shared.errors import ExitCode, StartupError
from shared.held_ports import HeldPorts
from shared.runtime_dir import RuntimeDir, gateway_role
from shared.settings import Settings

PORTS = {"gateway.grpc_address": "--grpc-address", "gateway.http_address": "--http-address"}
"""Settings, and the options with which the supervisor says what they have come to."""


class Told(NamedTuple):
    """The command line."""

    config: Path | None
    number: int
    """Of this gateway, from 0."""
    ports: dict[str, str]
    """Setting → address that the supervisor holds for all gateways; empty without one."""
    parent_pid: int | None


def parse() -> tuple[Told, int | None]:
    """And the descriptor on which to say that the process is ready. Ends the process when there is a mistake."""
    parser = argparse.ArgumentParser("python -m gateway", description="The Headrace gateway process.")
    parser.add_argument("--config", type=Path, default=None, help="settings file (default: headrace.yaml, if present)")
    parser.add_argument(
        "--index", type=_index, default=0, help="number of this gateway, below gateway.processes (default 0)"
    )
    for name, option in PORTS.items():
        parser.add_argument(option, dest=name, default=None, help=argparse.SUPPRESS)
    add_child_arguments(parser)
    given = parser.parse_args()
    ports = {name: address for name in PORTS if (address := getattr(given, name)) is not None}
    return Told(given.config, given.index, ports, given.parent_pid), given.ready_fd


def with_ports(settings: Settings, told: Told) -> Settings:
    """The settings with the real ports in place of what they say, which may be 0. Raises StartupError."""
    if told.number >= settings.gateway.processes:
        raise StartupError(
            ExitCode.BAD_SETTINGS,
            f"--index {told.number} is not below gateway.processes ({settings.gateway.processes})",
        )
    fields = {name.partition(".")[2]: address for name, address in told.ports.items()}
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update=fields)})


def hold_ports(settings: Settings, number: int, runtime: RuntimeDir) -> HeldPorts | None:
    """Without a supervisor the first gateway holds the ports; None for the others, which find it there.

    Raises StartupError: IN_USE by somebody else, or BAD_SETTINGS.
    """
    asked = {
        "gateway.grpc_address": settings.gateway.grpc_address,
        "gateway.http_address": settings.gateway.http_address,
    }
    for name, address in asked.items():
        if address.endswith(":0"):
            raise StartupError(
                ExitCode.BAD_SETTINGS,
                f"{name} is {address}: gateways that are started one by one need the same port, not each a free one",
            )
    try:
        return HeldPorts.hold(asked)
    except StartupError as error:
        others = (gateway_role(each) for each in range(settings.gateway.processes) if each != number)
        if error.exit_code != ExitCode.IN_USE or not any(map(runtime.is_held, others)):
            raise
        return None


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number from 0, not {text!r}")
    return int(text)
