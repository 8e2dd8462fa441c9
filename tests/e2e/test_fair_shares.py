"""Two models on one worker: a flood of the slow one, and a caller of the fast one who hardly notices."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Client
from tests.support.ledger import Load
from tests.support.stack import Site, eventually, serving, simulated_repository

pytestmark = pytest.mark.alone

SLOW_MS, FAST_MS = 100.0, 2.0
SPARE_MS = 60.0
"""For gateway, pool and a busy two-core machine."""
CALLS = 30


@pytest.fixture
def shared_site(tmp_path: Path) -> Iterator[Site]:
    """A slow model in batches of four rows, and a fast one."""
    root = simulated_repository(tmp_path / "models", "slow", a_ms=SLOW_MS, b_ms=0.0)
    simulated_repository(root, "fast", a_ms=FAST_MS, b_ms=0.0)
    site = Site(tmp_path / "site", root, batching={"max_rows": 4})
    yield site
    site.kill_all()


def test_a_flood_of_a_slow_model_costs_a_rare_fast_one_a_batch_of_it_and_no_more(
    shared_site: Site, jpeg: bytes
) -> None:
    with serving(shared_site), Client(shared_site.grpc, max_attempts=1) as client:
        with Load(shared_site.grpc, jpeg, model="slow", callers=32) as flood:
            flood.wait_for("ok", 16)
            eventually("a queue of the slow model", lambda: waiting_rows(shared_site, "slow") >= 4)
            before = flood.outcomes["ok"]
            waits = sorted(
                client.classify(jpeg, model="fast", timeout_s=2.0).server_timing.batch_ms for _ in range(CALLS)
            )
            answered = flood.outcomes["ok"] - before
        assert waits[int(0.9 * len(waits))] <= SLOW_MS + FAST_MS + SPARE_MS, waits
        assert set(flood.outcomes) == {"ok"}
        assert answered >= 0.7 * 4 * CALLS  # a slow batch runs between any two calls of the fast model
        assert flood.wrong == []
        assert flood.overdue == []


def test_two_flooded_models_get_the_workers_time_by_their_weights(tmp_path: Path, jpeg: bytes) -> None:
    root = simulated_repository(tmp_path / "models", "heavy", a_ms=40.0, b_ms=0.0)
    simulated_repository(root, "light", a_ms=20.0, b_ms=0.0)
    config = root / "heavy" / "model.yaml"
    config.write_text(config.read_text() + "batching: {weight: 3}\n")
    site = Site(tmp_path / "site", root, batching={"max_rows": 4})
    with (
        serving(site),
        Load(site.grpc, jpeg, model="heavy", callers=16) as heavy,
        Load(site.grpc, jpeg, model="light", callers=16) as light,
    ):
        heavy.wait_for("ok", 16)
        light.wait_for("ok", 16)
        before = batches(site)
        heavy.wait_for("ok", 200)
        after = batches(site)
    assert set(heavy.outcomes) == set(light.outcomes) == {"ok"}
    heavy_ms, light_ms = 40 * (after["heavy"] - before["heavy"]), 20 * (after["light"] - before["light"])
    assert heavy_ms / (heavy_ms + light_ms) == pytest.approx(0.75, abs=0.05)


def batches(site: Site) -> dict[str, int]:
    """How many each model has run."""
    return {model["name"]: sum(model["batch_rows"].values()) for model in site.debug()["models"]}


def waiting_rows(site: Site, name: str) -> int:
    return next(int(model["waiting_rows"]) for model in site.debug()["models"] if model["name"] == name)
