"""What `headrace models status` shows of each version."""

import io

from rich.console import Console

from headrace import admin_show
from headrace.admin_results import Models, VersionState


def shown(*versions: VersionState) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(admin_show.models(Models(versions=list(versions), memory=[]), wide=True))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_model_that_waits_for_its_first_request_is_no_fault_and_holds_no_memory() -> None:
    waits = VersionState(
        model="m",
        version="1",
        role="current",
        phase="on_demand",
        reason="the next request loads it",
        memory_bytes=10**8,
    )
    text = shown(waits)
    assert "on_demand" in text
    assert "✗" not in text
    assert "100.0 MB" not in text, "it was evicted: what it needed once is not in use"


def test_what_can_not_be_loaded_is_told_with_its_reason_and_what_is_loaded_with_its_memory() -> None:
    broken = VersionState(model="m", version="1", role="current", phase="failed", reason="the weights lack a")
    loaded = VersionState(model="n", version="2", role="current", phase="ready", reason="", memory_bytes=10**8)
    text = shown(broken, loaded)
    assert "✗ m 1: the weights lack a" in text
    assert "100.0 MB" in text
