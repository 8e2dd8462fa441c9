"""Canaries, shadows, ramps and rollbacks of a running server: who is answered by which version, and what goes back."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from gateway.guard import MOST_LOST
from headrace import Client, InferenceError
from headrace.admin_client import AdminClient
from headrace.admin_results import VersionFigures, VersionState
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from shared.errors import Conflict, HeadraceError, NotReady, UnknownModel, UnknownVersion
from shared.repository import Repository
from shared.repository_writer import change_traffic, now_utc
from shared.traffic import Canary, Ramp, Traffic, Why, start_canary, switch
from tests.support import canary as parts
from tests.support.canary import Paced, ask, has, traffic_on_disk
from tests.support.stack import Process, Site, eventually, serving

pytestmark = pytest.mark.alone

KEYS = [f"caller-{number}" for number in range(2000)]
MIN_SAMPLES = 20
"""`guard.min_samples` as it is unless set."""
IN_FLIGHT = 12
"""Answers that a canary may give while its rollback is being written: a tenth of a second's, at most."""
CHANGE_LIMIT_S = 20.0


class Served(NamedTuple):
    """A running server with what it serves."""

    site: Site
    root: Path
    process: Process
    admin: AdminClient
    moody: dict[str, str]
    """Versions of the model `moody`, by what is the matter with them."""
    plain: list[str]
    """Versions of the model `plain`: all are well."""

    def loads(self) -> int:
        """How many versions the worker has loaded in its life."""
        return sum(memory.loads for memory in self.admin.models().memory)

    def states(self, model: str) -> dict[str, VersionState]:
        """What the server knows of each version that it has."""
        return {each.version: each for each in self.admin.models().versions if each.model == model and each.role}

    def back_to(self, model: str, version: str) -> None:
        """For the next test: no canary, and this version for everybody."""
        self.admin.switch(model, version)

    def last_change(self, model: str) -> dict[str, Any]:
        """As traffic.json has it."""
        return traffic_on_disk(self.root, model).history[-1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("canary") / "models"
    moods = {
        "steady": (parts.STEADY, 1.0),
        "alike": (parts.STEADY, 1.0001),
        "other": (parts.STEADY, 2.0),
        "raises": (parts.RAISES, 1.0),
        "slow": (parts.SLOW, 1.0),
        "nan": (parts.NAN, 1.0),
        "broken": (parts.BROKEN, 1.0),
        "flipped": (parts.STEADY, 1.0002),
        "ends": (parts.ENDS, 1.0),
    }
    moody = parts.add_moody(root, "moody", **moods)
    plain = parts.add_plain(root, "plain", batch_ms=[1.0, 1.1, 1.2])
    site = Site(tmp_path_factory.mktemp("canary-site"), root, pool={"processes": 1})
    with serving(site) as process, parts.admin_of(site) as admin:
        yield Served(site, root, process, admin, moody, plain)


# ------------------------------------------------------------ who goes where


def test_five_percent_are_five_percent_the_same_ones_each_time_and_growing_moves_nobody_else(served: Served) -> None:
    current, canary = served.plain[:2]
    served.admin.canary("plain", Canary(version=canary, percent=5))
    first = ask(served.site, "plain", KEYS)
    count = sum(version == canary for version in first.values())
    assert abs(count - 0.05 * len(KEYS)) < 4 * math.sqrt(len(KEYS) * 0.05 * 0.95), count
    assert set(first.values()) == {current, canary}
    again = ask(served.site, "plain", KEYS[:500])
    assert again == {key: first[key] for key in again}
    served.admin.canary("plain", Canary(version=canary, percent=25))
    grown = ask(served.site, "plain", KEYS)
    count = sum(version == canary for version in grown.values())
    assert abs(count - 0.25 * len(KEYS)) < 4 * math.sqrt(len(KEYS) * 0.25 * 0.75), count
    assert not [key for key in KEYS if first[key] == canary != grown[key]], "nobody goes back"
    assert [grown[key] == canary for key in KEYS] == [has("plain", canary, key, 25) for key in KEYS]
    served.back_to("plain", current)
    assert set(ask(served.site, "plain", KEYS[:100]).values()) == {current}


def test_a_request_without_a_key_goes_by_its_id(served: Served) -> None:
    current, canary = served.plain[:2]
    served.admin.canary("plain", Canary(version=canary, percent=50))
    by_id = by_request_id(served, KEYS[:60])
    assert by_id == {key: canary if has("plain", canary, key, 50) else current for key in KEYS[:60]}
    served.admin.canary("plain", Canary(version=canary, percent=50, by="request_id"))
    assert by_request_id(served, KEYS[:60], routing_key="always the same") == by_id
    served.back_to("plain", current)


def by_request_id(served: Served, ids: list[str], routing_key: str = "") -> dict[str, str]:
    tensor = parts.input_of().tensors[0]
    wire = pb.Tensor(name="x", datatype="FP32", shape=(1, 2), data=tensor.data)
    inputs = [pb.Input(tensors=pb.TensorList(tensors=[wire]))]
    with grpc.insecure_channel(served.site.grpc) as channel:
        predict = pb_grpc.InferenceStub(channel).Predict
        return {
            each: predict(
                pb.PredictRequest(model="plain", request_id=each, routing_key=routing_key, inputs=inputs), timeout=10
            ).version
            for each in ids
        }


# ------------------------------------------------------------ bad canaries


@pytest.mark.parametrize(
    ("mood", "measure"), [("raises", "error rate"), ("slow", "slow batches"), ("nan", "non-finite rate")]
)
def test_a_bad_canary_is_rolled_back_by_itself_and_the_others_see_nothing_of_it(
    served: Served, mood: str, measure: str
) -> None:
    current, canary = served.moody["steady"], served.moody[mood]
    with Paced(served.site, "moody", rate=100) as load:
        load.wait_for(2 * MIN_SAMPLES)
        served.admin.canary("moody", Canary(version=canary, percent=25))
        eventually("the guard to end it", lambda: served.admin.traffic("moody").traffic.canary is None, CHANGE_LIMIT_S)
        load.wait_for(50)
    canarys = [answer for answer in load.answers if answer.version == canary or answer.reason]
    assert MIN_SAMPLES <= len(canarys) <= MIN_SAMPLES + IN_FLIGHT, len(canarys)
    assert all(has("moody", canary, answer.key, 25) for answer in load.failures()), load.failures()
    assert {answer.reason for answer in load.failures()} <= {"internal"}
    assert {answer.version for answer in load.answers[-20:]} == {current}
    change = served.last_change("moody")
    assert (change["action"], change["by"]) == ("rollback", "guard")
    assert (change["from"], change["to"]) == (canary, current)
    assert measure in change["reason"]
    assert change["figures"]["measure"] == measure
    assert change["figures"]["canary_rate"] > change["figures"]["allowed_rate"]
    assert change["figures"]["log10_evidence"] >= change["figures"]["log10_needed"]


def test_a_canary_that_ends_its_worker_is_rolled_back_at_the_second_input(served: Served) -> None:
    """Each costs two workers: with twenty of them callers would wait for minutes."""
    current, canary = served.moody["steady"], served.moody["ends"]
    served.admin.canary("moody", Canary(version=canary, percent=25))
    keys = [key for key in KEYS if has("moody", canary, key, 25)][:4]
    outcomes: list[str] = []
    with Client(served.site.grpc, max_attempts=1) as client:
        for number, key in enumerate(keys):
            if number < MOST_LOST:  # while it is being loaded again the current version answers its callers
                eventually("the canary to be back", lambda: is_ready(served, canary), CHANGE_LIMIT_S)
            else:
                eventually("the guard to end it", lambda: not served.admin.traffic("moody").traffic.canary, 10.0)
                eventually("the worker to be back", served.site.ready, CHANGE_LIMIT_S)
            try:  # different inputs: one that has ended two workers is kept away
                asked = [parts.input_of(1.0 + number)]
                outcomes.append(client.predict(asked, model="moody", routing_key=key, timeout_s=30).version)
            except InferenceError as error:
                outcomes.append(error.reason)
    assert outcomes == ["process_lost"] * MOST_LOST + [current] * 2
    change = served.last_change("moody")
    assert (change["by"], change["figures"]["measure"]) == ("guard", "lost workers")
    assert "a worker died or hung with 2 of its batches" in change["reason"]


def is_ready(served: Served, version: str) -> bool:
    state = served.states("moody").get(version)
    return state is not None and state.phase == "ready"


def test_a_shadow_answers_nobody_and_is_ended_when_it_disagrees(served: Served) -> None:
    current, shadow = served.moody["steady"], served.moody["other"]
    with Paced(served.site, "moody", rate=100) as load:
        served.admin.canary("moody", Canary(version=shadow, percent=50, shadow=True))
        eventually("the guard to end it", lambda: served.admin.traffic("moody").traffic.canary is None, CHANGE_LIMIT_S)
        load.wait_for(20)
    assert {(answer.version, answer.reason, answer.values) for answer in load.answers} == {(current, "", (7.0, 1.0))}
    change = served.last_change("moody")
    assert (change["action"], change["by"], change["figures"]["measure"]) == ("rollback", "guard", "disagreement")
    found = {each.version: each for each in served.admin.traffic("moody").figures}
    assert found[shadow].role == "shadow"
    assert found[shadow].disagreed == found[shadow].compared >= MIN_SAMPLES


def test_a_shadow_that_agrees_is_compared_and_stays(served: Served) -> None:
    current, shadow = served.moody["steady"], served.moody["alike"]
    served.admin.canary("moody", Canary(version=shadow, percent=100, shadow=True))
    with Paced(served.site, "moody", rate=100) as load:
        eventually("fifty copies", lambda: figures(served, shadow).compared >= 50, CHANGE_LIMIT_S)
    assert figures(served, shadow).disagreed == figures(served, shadow).errors == 0
    assert served.admin.traffic("moody").traffic.canary is not None
    assert {answer.version for answer in load.answers} == {current}
    served.back_to("moody", current)


def figures(served: Served, version: str) -> VersionFigures:
    return next(each for each in served.admin.traffic("moody").figures if each.version == version)


# ------------------------------------------------------------ by hand, and by the clock


def test_a_rollback_is_in_force_while_the_repository_can_not_be_written_and_written_afterwards(served: Served) -> None:
    old, new = served.plain[:2]
    served.admin.canary("plain", Canary(version=new, percent=50))
    assert set(ask(served.site, "plain", KEYS[:50]).values()) == {old, new}
    in_the_way = served.root / "plain" / ".new-traffic.json"
    in_the_way.mkdir()  # where the new one is written first; root may write anything else
    began_s = time.monotonic()
    assert served.admin.roll_back("plain", "a test", new).canary is None
    assert time.monotonic() - began_s < 1.0
    assert set(ask(served.site, "plain", KEYS[:50]).values()) == {old}
    assert traffic_on_disk(served.root, "plain").canary is not None
    told = served.admin.traffic("plain").unwritten
    assert "can't be written: Is a directory" in told
    assert served.states("plain")[old].notes == [f"in force, not yet written: {told}"]
    with pytest.raises(NotReady, match="can't be written"):
        served.admin.switch("plain", new)
    in_the_way.rmdir()
    eventually("it to be written", lambda: not served.admin.traffic("plain").unwritten, CHANGE_LIMIT_S)
    assert served.last_change("plain")["reason"] == "a test"
    served.back_to("plain", old)


def test_promoting_and_going_back_under_load_takes_no_load_no_error_and_nobody_later(served: Served) -> None:
    old, new = served.moody["steady"], served.moody["alike"]
    with Paced(served.site, "moody", rate=50) as load:
        served.admin.canary("moody", Canary(version=new, percent=50))
        load.wait_for(20)
        loads, loaded = served.loads(), served.process.output().count('"model loaded"')
        assert old not in answering_after(load, lambda: served.admin.promote("moody"))
        assert (served.states("moody")[old].role, served.states("moody")[old].phase) == ("standby", "ready")
        assert new not in answering_after(load, lambda: served.admin.roll_back("moody", "a test"))
        assert (served.states("moody")[new].role, served.states("moody")[new].phase) == ("standby", "ready")
        served.admin.canary("moody", Canary(version=new, percent=50))  # it is there already
        load.wait_for(20)
        assert new not in answering_after(load, lambda: served.admin.roll_back("moody"))
    assert load.failures() == []
    assert (served.loads(), served.process.output().count('"model loaded"')) == (loads, loaded)
    changes = traffic_on_disk(served.root, "moody").history[-5:]
    assert [change["action"] for change in changes] == ["canary", "promote", "rollback", "canary", "rollback"]
    assert changes[2]["reason"] == "a test"


def answering_after(load: Paced, order: Callable[[], object]) -> set[str]:
    """Versions that answer the calls which begin after an order has returned."""
    order()
    begun = load.begun
    load.wait_for(60)
    later = load.begun_since(begun)
    assert later, "nobody has called since"
    return {answer.version for answer in later}


def test_a_ramp_promotes_by_itself(served: Served) -> None:
    old, new = served.plain[:2]
    ramp = Ramp(steps=[5, 50, 100], every_s=1)
    served.admin.canary("plain", Canary(version=new, percent=5, ramp=ramp))
    with Paced(served.site, "plain", rate=50) as load:
        eventually("it to be current", lambda: served.admin.traffic("plain").traffic.current == new, CHANGE_LIMIT_S)
        load.wait_for(20)
    assert load.failures() == []
    assert {answer.version for answer in load.answers[-10:]} == {new}
    changes = traffic_on_disk(served.root, "plain").history[-3:]
    assert [(change["action"], change.get("percent")) for change in changes] == [
        ("canary", 5),
        ("ramp", 50),
        ("promote", None),
    ]
    assert [change["by"] for change in changes] == [f"tester (uid {os.getuid()})", "ramp", "ramp"]
    served.back_to("plain", old)


def test_of_two_admins_at_once_one_wins_and_the_other_is_told(served: Served) -> None:
    current, *others = served.plain
    outcomes: dict[str, object] = {}

    def order(version: str) -> None:
        with parts.admin_of(served.site) as admin:
            try:
                outcomes[version] = admin.canary("plain", Canary(version=version, percent=5))
            except HeadraceError as error:
                outcomes[version] = error

    for _ in range(5):
        admins = [threading.Thread(target=order, args=(version,)) for version in others]
        for admin in admins:
            admin.start()
        for admin in admins:
            admin.join(CHANGE_LIMIT_S)
        (won,) = [version for version, outcome in outcomes.items() if isinstance(outcome, Traffic)]
        (lost,) = [outcome for outcome in outcomes.values() if isinstance(outcome, Conflict)]
        assert f"version {won} is the canary already" in str(lost)
        canary = traffic_on_disk(served.root, "plain").canary
        assert canary is not None
        assert canary.version == won
        served.admin.roll_back("plain")
    served.back_to("plain", current)


# ------------------------------------------------------------ what can't be


def test_a_version_that_can_not_be_had_changes_nothing(served: Served) -> None:
    current, broken, flipped = (served.moody[word] for word in ("steady", "broken", "flipped"))
    weights = Repository(served.root).open("moody", flipped).files / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(content)
    before = traffic_on_disk(served.root, "moody")
    with Paced(served.site, "moody") as load:
        with pytest.raises(NotReady, match="RuntimeError"):
            served.admin.canary("moody", Canary(version=broken, percent=5))
        with pytest.raises(NotReady, match=r"weights\.safetensors"):
            served.admin.switch("moody", flipped)
        with pytest.raises(UnknownVersion, match="0123456789abcdef"):
            served.admin.canary("moody", Canary(version="0123456789abcdef", percent=5))
        load.wait_for(10)
    assert load.failures() == []
    assert {answer.version for answer in load.answers} == {current}
    assert traffic_on_disk(served.root, "moody") == before
    assert {state.version for state in served.admin.models().versions if state.phase == "failed"} == set()
    on_disk_only(served, flipped, "weights.safetensors")


def on_disk_only(served: Served, version: str, cause: str) -> None:
    """traffic.json is written by somebody else: the server says why it does not follow, until it may."""
    current = served.moody["steady"]
    change_traffic(served.root, "moody", lambda before: switch(before, version, Why(now_utc(), "somebody")))
    refused = wait_refused(served, cause)
    assert current in served.states("moody")
    assert str(served.root) not in refused
    assert set(ask(served.site, "moody", KEYS[:20]).values()) == {current}
    change_traffic(served.root, "moody", lambda before: switch(before, current, Why(now_utc(), "somebody")))
    eventually("nothing to be refused", lambda: not refused_now(served), CHANGE_LIMIT_S)


def refused_now(served: Served) -> str:
    return served.states("moody")[served.moody["steady"]].refused


def wait_refused(served: Served, cause: str) -> str:
    eventually(f"a refusal that names {cause}", lambda: cause in refused_now(served), CHANGE_LIMIT_S)
    shown = [each["refused"] for each in served.site.debug()["models"] if each["name"] == "moody"]
    assert refused_now(served) in shown
    return refused_now(served)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (parts.MOODY_MODEL.replace("network:", "netwrok:"), "netwrok"),
        (parts.MOODY_MODEL.replace("moody:Moody", "moody:Absent"), "Absent"),
        ("pipeline: [", "model.yaml"),
    ],
)
def test_a_wrong_model_yaml_is_refused_and_the_old_one_goes_on(served: Served, wrong: str, cause: str) -> None:
    config = served.root / "moody" / "model.yaml"
    with Paced(served.site, "moody") as load:
        config.write_text(wrong)
        wait_refused(served, cause)
        load.wait_for(10)
        config.write_text(parts.MOODY_MODEL)
        eventually("nothing to be refused", lambda: not refused_now(served), CHANGE_LIMIT_S)
    assert load.failures() == []
    assert {answer.values for answer in load.answers} == {(7.0, 1.0)}


def test_a_right_model_yaml_takes_effect_without_an_error(served: Served) -> None:
    config = served.root / "moody" / "model.yaml"
    with Paced(served.site, "moody") as load:
        config.write_text(parts.MOODY_MODEL.replace("moody:Moody", "moody:Loud"))
        eventually("the louder one", lambda: load.answers[-1].values == (21.0, 3.0), CHANGE_LIMIT_S)
        config.write_text(parts.MOODY_MODEL)
        eventually("the first one again", lambda: load.answers[-1].values == (7.0, 1.0), CHANGE_LIMIT_S)
    assert load.failures() == []
    told = [answer.values for answer in load.answers]
    assert set(told) == {(7.0, 1.0), (21.0, 3.0)}
    assert not refused_now(served)


def test_a_right_model_yaml_leaves_the_callers_where_they_are(served: Served) -> None:
    config, (first, second, _) = served.root / "plain" / "model.yaml", served.plain
    served.admin.canary("plain", Canary(version=second, percent=50))
    loads = served.loads()
    with Paced(served.site, "plain") as load:
        config.write_text(parts.PLAIN_MODEL + "batching: {max_rows: 4}\n")
        eventually("both versions to be loaded anew", lambda: served.loads() >= loads + 2, CHANGE_LIMIT_S)
        eventually("the former ones to be gone", lambda: debug_phases(served, "plain") == ["ready"] * 2, CHANGE_LIMIT_S)
        load.wait_for(20)
    assert load.failures() == []
    assert all(answer.version == (second if has("plain", second, answer.key, 50) else first) for answer in load.answers)
    served.back_to("plain", first)


def debug_phases(served: Served, model: str) -> list[str]:
    return [each["phase"] for each in served.site.debug()["models"] if each["name"] == model]


# ------------------------------------------------------------ another life


def test_an_unloaded_model_comes_back_with_its_canary(served: Served) -> None:
    first, second = served.plain[:2]
    served.admin.canary("plain", Canary(version=second, percent=50))
    expected = ask(served.site, "plain", KEYS[:50])
    served.admin.unload("plain")
    with Client(served.site.grpc, max_attempts=1) as client, pytest.raises(InferenceError) as caught:
        client.predict([parts.input_of()], model="plain")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    with pytest.raises(UnknownModel):
        served.admin.roll_back("plain")
    served.admin.load("plain")
    assert ask(served.site, "plain", KEYS[:50]) == expected
    assert {state.role for state in served.states("plain").values()} >= {"current", "canary"}
    served.back_to("plain", first)


def test_a_canary_and_a_standby_come_up_again_with_the_server(tmp_path: Path) -> None:
    root = tmp_path / "models"
    first, second, third = parts.add_plain(root, "plain", batch_ms=[1.0, 1.1, 1.2])
    why = Why(now_utc(), "another life")
    change_traffic(root, "plain", lambda before: switch(before, second, why))
    change_traffic(root, "plain", lambda before: start_canary(before, Canary(version=third, percent=40), why))
    wanted = {(second, "current", "ready"), (third, "canary", "ready"), (first, "standby", "ready")}
    site = Site(tmp_path / "site", root, pool={"processes": 1})
    with serving(site), parts.admin_of(site) as admin:
        eventually(
            "all three to be ready",
            lambda: {(each.version, each.role, each.phase) for each in admin.models().versions} == wanted,
            CHANGE_LIMIT_S,
        )
        keys = KEYS[:200]
        assert ask(site, "plain", keys) == {key: third if has("plain", third, key, 40) else second for key in keys}
        assert admin.roll_back("plain").canary is None
        with pytest.raises(Conflict, match="was a rollback already"):
            admin.roll_back("plain")
        assert admin.roll_back("plain", ends=second).current == first
        assert set(ask(site, "plain", keys[:20]).values()) == {first}
