"""Tables of what a server does: a model's traffic, and all versions with the workers' memory."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.admin_results import Change, Models, TrafficNow, VersionFigures, VersionState, WorkerMemory
from headrace.output import literal
from shared.traffic import Canary, Traffic

LAST_CHANGES = 5
_BAR_CELLS = 24
_STAGES = ("wait", "read", "build", "device", "warm_up")
_WELL = ("ready", "on_demand")
"""Phases that need no explanation."""
_PHASE_STYLE = {"ready": "green", "on_demand": "green", "failed": "red", "no_worker": "red"}


def traffic(name: str, now: TrafficNow, note: str = "") -> RenderableType:
    """Who is answered by which version, what comes next, and what came before."""
    parts: list[RenderableType] = [_figures(now)]
    canary = now.traffic.canary
    if canary is not None:
        parts.append(literal(f"{name}: {canary_text(canary)}"))
    parts += [warning(each) for each in amiss(now)]
    if now.traffic.history:
        parts.append(_history(now.traffic.history[-LAST_CHANGES:]))
    if note:
        parts.append(literal(note, "dim"))
    return Group(*parts)


def amiss(now: TrafficNow) -> list[str]:
    """What is not as the table says, or not for good, one sentence each."""
    found = [f"in force, not yet written: {now.unwritten}; it is tried again"] if now.unwritten else []
    if now.coming is None:
        return found
    if now.refused:
        return [*found, f"traffic.json says something else, which is not served: {now.refused}"]
    if now.loading is not None:
        return [*found, f"{now.loading.version} is loading; until it can answer, {now.traffic.current} answers for it"]
    return [*found, f"{now.coming.current} is to answer and is loading; until then {now.traffic.current} goes on"]


def warning(text: str) -> Text:
    """A line for what is not as it should be."""
    return Text("! ", "yellow") + literal(text)


def _figures(now: TrafficNow) -> Table:
    found = {each.version: each for each in now.figures}
    counted = bool(found)
    compared = any(each.compared for each in now.figures)
    headings = ["version", "role", "share"]
    headings += ["reqs", "err", "NaN", "slow", "p50 ms", "p99 ms"] if counted else []
    headings += ["compared", "disagreed"] if compared else []
    table = _table(*headings)
    shown = roles(now.traffic)
    if now.loading is not None:
        what = "shadow" if now.loading.shadow else "canary"
        shown.insert(1, (now.loading.version, f"{what}, loading", 0.0))
    for version, role, share in shown:
        row = [Text(version), _role(role), Text(f"{share:g} %")]
        if counted:
            row += _numbers(found.get(version, VersionFigures(version=version)), compared=compared)
        table.add_row(*row)
    return table


def roles(traffic: Traffic) -> list[tuple[str, str, float]]:
    """Each version that has one, its role and its share in percent; of a shadow, of what it gets copies of."""
    canary = traffic.canary
    taken = canary.percent if canary is not None and not canary.shadow else 0.0
    found = [(traffic.current, "current", 100 - taken)]
    if canary is not None:
        found.append((canary.version, "shadow" if canary.shadow else "canary", canary.percent))
    if traffic.standby and traffic.standby not in {version for version, *_ in found}:
        found.append((traffic.standby, "standby", 0.0))
    return found


def _numbers(figures: VersionFigures, *, compared: bool) -> list[Text]:
    bad = "red" if figures.errors or figures.nonfinite else ""
    row = [Text(str(figures.requests)), Text(str(figures.errors), bad), Text(str(figures.nonfinite), bad)]
    row.append(Text(f"{figures.slow}/{figures.batches}" if figures.batches else "–"))
    row += [Text(f"{value:.1f}" if value else "–") for value in (figures.p50_ms, figures.p99_ms)]
    return [*row, Text(str(figures.compared)), Text(str(figures.disagreed))] if compared else row


def canary_text(canary: Canary) -> str:
    """What a canary gets, and what its ramp does next."""
    what = "gets copies of" if canary.shadow else "answers"
    told = f"{canary.version} {what} {canary.percent:g} % of the callers, by {canary.by}"
    ramp = canary.ramp
    if ramp is None or ramp.step + 1 >= len(ramp.steps):
        return told
    following = ramp.steps[ramp.step + 1]
    left_s = max(0.0, ramp.next_at_s - time.time())
    steps = ", ".join(f"{step:g}" for step in ramp.steps)
    return f"{told}; {following:g} % in {duration_text(left_s)} (steps {steps} %, every {duration_text(ramp.every_s)})"


def duration_text(seconds: float) -> str:
    """`45 s`, `9 min 30 s`, `2 h`, as short as it can be told."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    told = [(days, "d"), (hours, "h"), (minutes, "min"), (whole % 60, "s")]
    parts = [f"{number} {unit}" for number, unit in told if number]
    return " ".join(parts[:2]) or "0 s"


def done_text(name: str, after: Traffic) -> str:
    """What an order has led to, in one line."""
    action = after.history[-1].get("action", "") if after.history else ""
    if after.canary is not None:
        return f"{name}: {canary_text(after.canary)}"
    back = f"; {after.standby} stays loaded" if after.standby else ""
    told = {"rollback": "rolled back: ", "drop_standby": "nothing to go back to: "}.get(action, "")
    return f"{name}: {told}{after.current} answers all callers{back}"


def _history(changes: Sequence[dict[str, Any]]) -> Table:
    table = _table("at", "change", "to", "by", "why")
    for each in changes:
        percent = f" {each['percent']:g} %" if "percent" in each else ""
        texts = (each.get("at", ""), f"{each.get('action', '')}{percent}", each.get("to", ""), each.get("by", ""))
        table.add_row(*map(literal, (*texts, each.get("reason", ""))))
    return table


def models(found: Models, *, wide: bool) -> RenderableType:
    """Every version that is served, and what the workers' memory holds. `wide`: with everything."""
    table = _table("model", "version", "role", "phase", "memory", "load", "uses", *(["precision"] if wide else []))
    reasons = []
    for state in found.versions:
        if not state.phase:  # stored only: `headrace models list`
            continue
        table.add_row(*_state_row(state, wide=wide))
        told = filter(None, (state.reason if state.phase not in _WELL else "", state.refused))
        reasons += [Text("✗ ", "red") + literal(f"{state.model} {state.version}: {each}") for each in told]
        reasons += [warning(f"{state.model} {state.version}: {each}") for each in state.notes]
    return Group(table, *map(_memory, found.memory), *reasons)


def _state_row(state: VersionState, *, wide: bool) -> list[Text]:
    share = f" {state.share:g} %" if 0 < state.share < 100 else ""
    stages = ", ".join(f"{stage} {taken:.1f}" for stage, taken in _in_order(state.stages_s) if taken >= 0.05)
    load = f"{state.load_s:.1f} s" + (f" ({stages})" if stages and wide else "") if state.load_s else ""
    row = [
        literal(state.model),
        Text(state.version or "none"),
        _role(state.role) + Text(share),
        Text(state.phase, _PHASE_STYLE.get(state.phase, "yellow")),
        Text(f"{state.memory_bytes / 1e6:.1f} MB" if state.memory_bytes and state.phase != "on_demand" else ""),
        Text(load),
        Text(f"{state.uses} ({state.uses_per_minute:.0f}/min)" if state.uses else ""),
    ]
    return [*row, Text(state.precision)] if wide else row


def _in_order(stages_s: Mapping[str, float]) -> list[tuple[str, float]]:
    """As they follow one another: a map of protobuf's has no order."""
    return sorted(stages_s.items(), key=lambda each: _STAGES.index(each[0]) if each[0] in _STAGES else len(_STAGES))


def _memory(worker: WorkerMemory) -> Text:
    """A bar of the budget."""
    part = min(1.0, worker.models_bytes / worker.budget_bytes) if worker.budget_bytes else 0.0
    cells = round(part * _BAR_CELLS)
    colour = "red" if part > 0.95 else "yellow" if part > 0.8 else "green"
    bar = Text("█" * cells, colour) + Text("░" * (_BAR_CELLS - cells), "dim")
    held, budget, process = (
        f"{nbytes / 1e6:.1f}" for nbytes in (worker.models_bytes, worker.budget_bytes, worker.process_bytes)
    )
    told = f" {held} of {budget} MB; process {process} MB, {worker.loads} loads, {worker.evictions} evictions"
    return literal(f"{worker.worker} ") + bar + Text(told)


def change_lines(change: Change, known: dict[tuple[str, str], VersionState]) -> list[Text]:
    """One line per version or traffic that is new or different; `known` is brought up to date."""
    lines = []
    for state in change.versions:
        before = known.get((state.model, state.version))
        known[state.model, state.version] = state
        if before is None or (before.phase, before.role, before.share) != (state.phase, state.role, state.share):
            old = f"{before.phase} → " if before is not None and before.phase != state.phase else ""
            share = f" {state.share:g} %" if state.share else ""
            reason = f": {state.reason}" if state.reason and state.phase != "ready" else ""
            lines.append(literal(f"{state.model} {state.version} {state.role}{share} {old}{state.phase}{reason}"))
        if state.refused and (before is None or before.refused != state.refused):
            lines.append(literal(f"{state.model} {state.version} stays: {state.refused}", "red"))
    for state in change.removed:
        known.pop((state.model, state.version), None)
        lines.append(literal(f"{state.model} {state.version} is gone"))
    if not change.whole:
        lines += [literal(done_text(name, found)) for name, found in change.traffic.items() if found.current]
    return lines


def _role(role: str) -> Text:
    return Text("● current", "green") if role == "current" else Text(role)


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    texts = {"model", "version", "role", "phase", "precision", "at", "change", "to", "by", "why", "load"}
    for heading in headings:  # names and reasons give way in a narrow terminal; hashes and numbers are wrong when cut
        gives_way = heading in {"model", "by", "why", "load"}
        table.add_column(
            heading, justify="left" if heading in texts else "right", no_wrap=not gives_way, overflow="fold"
        )
    return table
