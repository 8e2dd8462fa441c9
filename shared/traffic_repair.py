"""A traffic.json that says nothing of use: what to do about it, and how an order gets past it."""

from pathlib import Path

import msgspec

from shared.repository import TRAFFIC_FILE, VERSIONS, way_out
from shared.repository_lock import locked
from shared.traffic import Traffic

DAMAGED_FILE = f"{TRAFFIC_FILE}.damaged"
"""Where its content is kept, for whoever has edited it; the next damage replaces it."""


def missing(name: str, version: str, role: str) -> str:
    """What to say of a version that traffic.json names and that is not there."""
    ways = {
        "standby": f"`headrace traffic {name} --drop-standby` gives it up",
        "canary": f"`headrace traffic {name} --rollback --ends {version}` ends it",
        "shadow": f"`headrace traffic {name} --rollback --ends {version}` ends it",
    }
    return f"{name}/{VERSIONS}/{version}: is missing; {ways.get(role, way_out(name))}"


def set_aside(root: Path, name: str) -> bool:
    """Give a model's traffic.json another name if its content can't be understood; False when there is none such.

    Called for an order, which then writes a new one: the order is newer than whatever was in it. Raises
    RepositoryError when the disk refuses.
    """
    path = root / name / TRAFFIC_FILE
    if not _is_damaged(path):
        return False
    with locked(path.parent):
        if _is_damaged(path):  # still, now that nobody else writes
            path.replace(path.with_name(DAMAGED_FILE))
    return True


def _is_damaged(path: Path) -> bool:
    """A file that can't be read at all is not damaged: what it says holds."""
    try:
        raw = path.read_bytes()
    except OSError:
        return False
    try:
        msgspec.json.decode(raw, type=Traffic)
    except msgspec.DecodeError:
        return True
    return False
