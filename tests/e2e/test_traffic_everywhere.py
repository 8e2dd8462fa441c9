"""Orders to a server with two gateways: in force at both whichever was asked, though one of them dies meanwhile."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shared.errors import Conflict, HeadraceError, StartupError
from shared.runtime_dir import gateway_role
from shared.traffic import Canary, Traffic
from tests.support.canary import Paced, add_plain, admin_of, ask, has, traffic_on_disk
from tests.support.stack import Site, eventually, serving

pytestmark = pytest.mark.alone

CONNECTIONS = 12
"""The kernel deals them out: that all go to one gateway happens once in 2048 times."""
KEYS = [f"caller-{number}" for number in range(120)]
AGREE_LIMIT_S = 20.0
SLOW_MS = 80.0
"""Of each batch of the version that is being brought up when a gateway dies: its warm-up takes half a second."""


class Two(NamedTuple):
    """A running server with two gateways."""

    site: Site
    root: Path
    versions: list[str]
    slow: str

    def kill(self, index: int) -> None:
        """Kill -9 of one gateway."""
        os.kill(self.pid(index), signal.SIGKILL)

    def pid(self, index: int) -> int:
        """Of one gateway."""
        return int(self._lock(index))

    def is_back(self, index: int, before: int) -> bool:
        """Whether another process is in a gateway's place, and all are ready."""
        return self._lock(index) not in {"", str(before)} and bool(self.site.debug().get("ready"))

    def _lock(self, index: int) -> str:
        """The holder's process id; empty while a new one takes it."""
        return (self.site.runtime / f"{gateway_role(index)}.lock").read_text().strip()

    def shown(self, index: int) -> Traffic | None:
        """What is in force at one gateway, by its own word; None while it is not there."""
        try:
            with admin_of(self.site, index) as admin:
                return admin.traffic("plain").traffic.without_history()
        except (HeadraceError, StartupError):
            return None

    def roles(self, index: int) -> dict[str, str]:
        """What each ready version is to one gateway."""
        with contextlib.suppress(HeadraceError, StartupError), admin_of(self.site, index) as admin:
            return {each.version: each.role for each in admin.models().versions if each.phase == "ready"}
        return {}

    def agreed(self) -> Traffic:
        """What both have in force, and the disk says: traffic.json whole, all that it names loaded at both."""

        def found() -> Traffic | None:
            on_disk = traffic_on_disk(self.root, "plain")
            bare = on_disk.without_history()
            same = self.shown(0) == self.shown(1) == bare
            there = self.roles(0) == self.roles(1) and set(self.roles(0)) == set(bare.wanted())
            return on_disk if same and there else None

        found_: Traffic = eventually("both gateways to agree with traffic.json", found, AGREE_LIMIT_S)
        return found_

    def start_over(self) -> Traffic:
        """For the next test: the first version for everybody, no canary."""
        with admin_of(self.site) as admin:
            admin.switch("plain", self.versions[0])
        return self.agreed()

    def ask(self) -> dict[str, str]:
        """Which version answers each key, over connections to both gateways."""
        return ask(self.site, "plain", KEYS, CONNECTIONS)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    root = tmp_path_factory.mktemp("everywhere") / "models"
    *versions, slow = add_plain(root, "plain", batch_ms=[1.0, 1.1, 1.2, SLOW_MS])
    gateway = {"processes": 2, "max_message_bytes": 4 * 1024 * 1024}
    site = Site(tmp_path_factory.mktemp("everywhere-site"), root, gateway=gateway)
    with serving(site):
        yield Two(site, root, versions, slow)


@pytest.mark.parametrize("asked", [0, 1])
def test_an_order_to_either_is_in_force_at_both(two: Two, asked: int) -> None:
    first, second, _ = two.versions
    with admin_of(two.site, asked) as admin:
        told = admin.canary("plain", Canary(version=second, percent=30))
        assert told.history[-1]["action"] == "canary"
        expected = {key: second if has("plain", second, key, 30) else first for key in KEYS}
        assert two.ask() == expected, "at once, at both"
        admin.promote("plain")
        assert set(two.ask().values()) == {second}
        assert two.agreed().standby == first
        admin.roll_back("plain")
        assert set(two.ask().values()) == {first}
    assert [change["action"] for change in two.agreed().history[-3:]] == ["canary", "promote", "rollback"]
    two.start_over()


def test_of_two_admins_at_two_gateways_one_wins(two: Two) -> None:
    outcomes: dict[str, object] = {}

    def order(index: int, version: str) -> None:
        with admin_of(two.site, index) as admin:
            try:
                outcomes[version] = admin.canary("plain", Canary(version=version, percent=5))
            except HeadraceError as error:
                outcomes[version] = error

    for _ in range(3):
        admins = [threading.Thread(target=order, args=each) for each in enumerate(two.versions[1:])]
        for admin in admins:
            admin.start()
        for admin in admins:
            admin.join(AGREE_LIMIT_S)
        (won,) = [version for version, outcome in outcomes.items() if isinstance(outcome, Traffic)]
        assert sum(isinstance(outcome, Conflict) for outcome in outcomes.values()) == 1, outcomes
        canary = two.agreed().canary
        assert canary is not None
        assert canary.version == won
        two.start_over()


def test_a_slow_canary_is_rolled_back_once_whichever_gateway_sees_it_first(two: Two) -> None:
    before = two.start_over()
    with admin_of(two.site, 1) as admin:
        admin.canary("plain", Canary(version=two.slow, percent=50))
        eventually(
            "a guard to end it", lambda: two.ask() and admin.traffic("plain").traffic.canary is None, AGREE_LIMIT_S
        )
    assert set(two.ask().values()) == {two.versions[0]}
    changes = two.agreed().history[len(before.history) :]
    assert [(change["action"], change["by"]) for change in changes[1:]] == [("rollback", "guard")]
    assert changes[1]["figures"]["measure"] == "slow batches"


@pytest.mark.parametrize(("asked", "killed"), [(0, 0), (0, 1), (1, 0)])
def test_a_gateway_that_dies_in_the_middle_of_an_order_leaves_them_agreed(two: Two, asked: int, killed: int) -> None:
    before = two.start_over()
    outcome: list[object] = []

    def order() -> None:
        with admin_of(two.site, asked) as admin:
            try:
                outcome.append(admin.canary("plain", Canary(version=two.slow, percent=1)))
            except (HeadraceError, StartupError) as error:
                outcome.append(error)

    admin = threading.Thread(target=order)
    admin.start()
    eventually("the version to be coming", lambda: coming(two), AGREE_LIMIT_S)
    two.kill(killed)
    admin.join(AGREE_LIMIT_S)
    assert outcome, "the order has not ended"
    eventually("both gateways", lambda: two.site.debug().get("ready"), AGREE_LIMIT_S)
    agreed = two.agreed()
    if isinstance(outcome[0], Traffic):
        assert agreed.without_history() == outcome[0].without_history()
    assert agreed.canary is None or agreed.canary.version == two.slow
    assert agreed.history[: len(before.history)] == before.history
    assert len(agreed.history) - len(before.history) == (agreed.canary is not None), "once, or not at all"
    if asked != killed:
        assert isinstance(outcome[0], Traffic), outcome
    two.start_over()


def coming(two: Two) -> bool:
    gateways = two.site.debug().get("gateways", {}).values()
    return any(model["version"] == two.slow for each in gateways for model in each.get("models", []))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_gateway_that_comes_back_has_what_was_ordered_before_and_meanwhile(two: Two, killed: int) -> None:
    first, second, third = two.versions
    with admin_of(two.site, 1 - killed) as admin, Paced(two.site, "plain") as load:
        admin.switch("plain", second)
        pid = two.pid(killed)
        two.kill(killed)
        told = admin.canary("plain", Canary(version=third, percent=30))
        assert told.canary is not None
        eventually("another gateway", lambda: two.is_back(killed, pid), AGREE_LIMIT_S)
        assert two.agreed().without_history() == told.without_history()
    assert two.ask() == {key: third if has("plain", third, key, 30) else second for key in KEYS}
    assert {answer.reason for answer in load.failures()} <= {"unavailable", "unreachable", "process_lost"}
    assert set(two.roles(killed)) == {first, second, third}
    two.start_over()
