"""What the server is able to do right now, as health, `/readyz` and `/debug` tell it."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import msgspec

Phase = Literal["no_worker", "loading", "proving", "ready", "failed", "unloaded", "on_demand"]
"""`proving`: loaded, but no real batch has come back through all processes yet; `unloaded`: by request; `on_demand`:
not loaded now, the next request loads it."""
Role = Literal["coming", "current", "canary", "shadow", "standby", "retiring"]
"""`coming`: being loaded beside the one that answers; `retiring`: finishes what it has, and takes nothing new."""


class ModelState(msgspec.Struct):
    """One served model version."""

    name: str
    version: str
    phase: Phase
    reason: str = ""
    """Why it is not ready: one sentence, safe to show."""
    precision: str = ""
    memory_bytes: int = 0
    load_s: float = 0.0
    row_cap: int | None = None
    """Rows that fit the device's memory at once, learned from running out of it."""
    on_demand: bool = False
    """Loaded by the requests that want it, and given up for other versions."""
    on_trial: bool = False
    """Of a model that was loaded by an order and has never been ready: nobody depends on it yet."""
    role: Role = "current"
    """What it is to its model."""
    refused: str = ""
    """Why a newer model.yaml, or a newer version, did not take this one's place: one sentence, safe to show."""
    unwritten: str = ""
    """Why it is in force and traffic.json does not say so yet: one sentence, safe to show."""
    doubt: str = ""
    """What its proof has shown, though it answers: one sentence, safe to show."""
    stages_s: dict[str, float] = {}
    """`load_s` by stage: wait, read, build, device, warm_up."""


def comes_by_request(state: ModelState) -> bool:
    """Whether a version is loaded by the requests that want it, as far as anybody knows."""
    return state.on_demand and state.phase not in {"no_worker", "failed"}


def held(states: Iterable[ModelState]) -> set[tuple[str, str]]:
    """Models and versions that can't be deleted: they answer, or are being loaded."""
    return {(each.name, each.version) for each in states if each.phase not in {"unloaded", "failed"}}


class ServerState(Protocol):
    """Implemented by the gateway's composition (`gateway/readiness.py`); read by the edge."""

    def models(self) -> list[ModelState]:
        """All served models."""

    def not_ready_reason(self) -> str | None:
        """None when every served model can answer a request now; otherwise one sentence."""

    def debug(self) -> dict[str, Any]:
        """Queue lengths, latency per stage, worker, pool and memory state: JSON-able."""

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the event loop after every change of a model's phase or of draining."""
