"""Models, versions, traffic and memory as admin messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.figures import VersionFigures
from gateway.state import ModelState
from protos.headrace.v1 import admin_pb2 as pb
from shared.messages import MemoryNote, ModelUse
from shared.repository import Meta
from shared.repository_diff import Difference, VersionDiff
from shared.traffic import Traffic

Key = tuple[str, str]
"""A model's name and a version."""
Notes = Sequence[tuple[str, MemoryNote]]
"""Each worker's name, and what it last said of its memory."""
_LEAST = ("", "coming", "retiring", "standby", "shadow", "canary", "current")
"""Roles, from the one that matters least."""


class Uses(NamedTuple):
    """How much a version is used, over all workers."""

    batches: int = 0
    per_minute: float = 0.0

    def and_of(self, use: ModelUse) -> "Uses":
        """With one worker's more."""
        return Uses(self.batches + use.batches, self.per_minute + use.per_minute)


def uses(notes: Notes) -> dict[Key, Uses]:
    """By model and version."""
    found: dict[Key, Uses] = {}
    for _, note in notes:
        for use in note.uses:
            key = (use.name, use.version)
            found[key] = found.get(key, Uses()).and_of(use)
    return found


def shares(traffic: Traffic) -> dict[str, float]:
    """Percent of the callers that each version answers, or as a shadow sees."""
    canary = traffic.canary
    if canary is None:
        return {traffic.current: 100.0}
    return {traffic.current: 100.0 if canary.shadow else 100.0 - canary.percent, canary.version: canary.percent}


def version_state(state: ModelState, share: float, use: Uses) -> pb.VersionState:
    """One version as the gateway knows it."""
    return pb.VersionState(
        model=state.name,
        version=state.version,
        role=state.role,
        phase=state.phase,
        reason=state.reason,
        refused=state.refused,
        share=share,
        memory_bytes=state.memory_bytes,
        load_s=state.load_s,
        stages_s=state.stages_s,
        precision=state.precision,
        row_cap=state.row_cap or 0,
        uses=use.batches,
        uses_per_minute=use.per_minute,
        notes=[note for note in (_not_written(state.unwritten), state.doubt) if note],
    )


def _not_written(reason: str) -> str:
    return f"in force, not yet written: {reason}" if reason else ""


def memory(notes: Notes) -> list[pb.WorkerMemory]:
    """One per worker."""
    return [
        pb.WorkerMemory(
            worker=worker,
            budget_bytes=note.budget_bytes,
            models_bytes=note.models_bytes,
            process_bytes=note.process_bytes,
            loads=note.loads,
            evictions=note.evictions,
        )
        for worker, note in sorted(notes, key=lambda each: each[0])
    ]


def traffic(found: Traffic, last: int | None = None) -> pb.Traffic:
    """traffic.json, with at most the `last` changes of its history."""
    history = found.history if last is None else found.history[len(found.history) - last :] if last else []
    message = pb.Traffic(current=found.current, standby=found.standby, history=map(change, history))
    canary = found.canary
    if canary is not None:
        message.canary.version, message.canary.percent = canary.version, canary.percent
        message.canary.by, message.canary.shadow = canary.by, canary.shadow
        if canary.ramp is not None:
            message.canary.ramp.CopyFrom(pb.Ramp(**msgspec.structs.asdict(canary.ramp)))
    return message


def change(entry: Mapping[str, Any]) -> pb.Change:
    """One entry of the history; the file may have been written by an earlier or later version of ours."""
    texts = {field: str(entry.get(key, "")) for field, key in _CHANGE.items()}
    percent, figures = entry.get("percent", 0), entry.get("figures")
    return pb.Change(
        **texts,
        percent=percent if isinstance(percent, int | float) else 0,
        figures_json=_json(figures or None),
    )


_CHANGE = {
    "at": "at",
    "action": "action",
    "from_version": "from",
    "to_version": "to",
    "by": "by",
    "reason": "reason",
}


def figures(each: VersionFigures, share: float) -> pb.VersionFigures:
    """What a version has done."""
    return pb.VersionFigures(
        version=each.version,
        role=each.role,
        share=share,
        requests=each.requests,
        errors=each.errors,
        nonfinite=each.nonfinite,
        slow=each.slow,
        batches=each.batches,
        compared=each.compared,
        disagreed=each.disagreed,
        p50_ms=each.p50_ms,
        p99_ms=each.p99_ms,
    )


def meta(found: Meta) -> pb.Meta:
    """meta.json."""
    fields = msgspec.structs.asdict(found)
    parameters = fields.pop("hyperparameters")
    return pb.Meta(**fields, hyperparameters_json=_json(parameters or None))


def difference(found: VersionDiff) -> pb.DiffResponse:
    """What two versions differ in."""
    return pb.DiffResponse(
        from_version=found.before,
        to_version=found.after,
        differences=map(_different, found.differences),
        weights=[
            pb.WeightsDifference(
                file=each.file,
                differences=map(_different, each.differences),
                same_layout=each.same_layout,
                unread_values=each.unread_values,
            )
            for each in found.weights
        ],
    )


def _different(each: Difference) -> pb.Difference:
    return pb.Difference(what=each.what, before_json=_json(each.before), after_json=_json(each.after))


def _json(value: Any) -> str:  # noqa: ANN401 - anything of a meta.json
    return "" if value is None else msgspec.json.encode(value).decode()


def by_key(states: Iterable[pb.VersionState]) -> dict[Key, pb.VersionState]:
    """By model and version, in that order.

    While a version comes up anew with another model.yaml there are two of it: then the one that answers is told of.
    """
    known: dict[Key, pb.VersionState] = {}
    for each in states:
        key = each.model, each.version
        if key not in known or _LEAST.index(each.role) > _LEAST.index(known[key].role):
            known[key] = each
    return dict(sorted(known.items(), key=lambda item: item[0]))
