from typing import Any

import pytest
from pydantic import ValidationError

from shared.settings import Settings
from shared.shares import more_pool_processes, share_of

MIB = 1024 * 1024


def settings(processes: int, **groups: Any) -> Settings:  # noqa: ANN401 - as the settings take them
    return Settings(**{**groups, "gateway": {"processes": processes, **groups.get("gateway", {})}})


def test_one_gateway_has_everything() -> None:
    alone = settings(1)
    assert share_of(alone, 0) is alone


def test_together_gateways_admit_no_more_than_one_would() -> None:
    three = settings(3, admission={"max_requests": 100, "max_rows": 1000})
    shares = [share_of(three, index) for index in range(3)]
    assert [share.admission.max_requests for share in shares] == [33, 33, 33]
    assert [share.admission.max_rows for share in shares] == [333, 333, 333]
    assert sum(share.admission.max_bytes for share in shares) <= three.admission.max_bytes
    assert sum(share.arena.budget_bytes for share in shares) <= three.arena.budget_bytes
    assert shares[0].admission.max_inputs_per_request == three.admission.max_inputs_per_request, "a limit of one call"


@pytest.mark.parametrize(("processes", "dealt"), [(7, [3, 2, 2]), (3, [1, 1, 1]), (2, [1, 1, 1]), (1, [1, 1, 1])])
def test_pool_processes_are_dealt_out_and_nobody_goes_without(processes: int, dealt: list[int]) -> None:
    three = settings(3, pool={"processes": processes})
    assert [share_of(three, index).pool.processes for index in range(3)] == dealt


def test_more_pool_processes_than_asked_for_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    told = more_pool_processes(settings(3))
    assert told is not None
    assert told.startswith(
        "3 pool processes, one for each of gateway.processes, though pool.processes: one per CPU core"
    )
    assert "though pool.processes is 1: " in (more_pool_processes(settings(3, pool={"processes": 1})) or "")
    for enough in (settings(1), settings(2), settings(3, pool={"processes": 3})):
        assert more_pool_processes(enough) is None


def test_the_default_is_a_process_per_core_of_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    assert [share_of(settings(2), index).pool.processes for index in range(2)] == [3, 2]


@pytest.mark.parametrize(
    ("groups", "refusal"),
    [
        ({}, r"gateway.max_message_bytes \(67108864\) must not be above .* / gateway.processes 268435456 / 8"),
        ({"gateway": {"max_message_bytes": MIB}, "admission": {"max_requests": 7}}, "max_requests / gateway.processes"),
        (
            {"gateway": {"max_message_bytes": MIB}, "admission": {"max_rows": 2000}, "batching": {"max_rows": 256}},
            r"batching.max_rows \(256\) must not be above admission.max_rows / gateway.processes 2000 / 8 \(250\)",
        ),
        ({"gateway": {"max_message_bytes": MIB, "system_shared_memory_prefix": "x"}}, "needs gateway.processes: 1"),
    ],
)
def test_a_share_that_could_not_work_is_refused(groups: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValidationError, match=refusal):
        settings(8, **groups)
