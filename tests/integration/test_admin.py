"""The admin service over its real socket: every method, by the client that the command line uses."""

import asyncio
import contextlib
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.api.admin import SERVICE
from gateway.api.admin_server import target_of
from gateway.state import ModelState
from headrace.admin_client import AdminClient
from headrace.admin_results import Change
from headrace.admin_wire import NoServer
from protos.headrace.v1 import admin_pb2 as pb
from protos.headrace.v1 import admin_pb2_grpc as pb_grpc
from shared.errors import (
    Conflict,
    ExitCode,
    InvalidInput,
    InvalidOption,
    Overloaded,
    StartupError,
    UnknownModel,
    UnknownVersion,
)
from shared.repository import Repository, way_out
from shared.repository_lock import locked
from shared.traffic import Canary, Ramp
from tests.support.fake_admin import (
    LIMIT_S,
    MODEL,
    AdminThread,
    admin_server,
    admin_settings,
)
from tests.support.fake_flow import Flow, State, serving
from tests.support.fake_flow import settings as public_settings
from tests.support.stack import eventually


@pytest.fixture
def server(root: Path, runtime_dir: Path, versions: list[str]) -> Iterator[AdminThread]:
    with admin_server(admin_settings(root, runtime_dir)) as server:
        yield server


@pytest.fixture
def admin(server: AdminThread) -> Iterator[AdminClient]:
    with AdminClient.connect(server.settings) as admin:
        yield admin


# ---------------------------------------------------------------- the socket


def test_the_socket_is_for_the_servers_user_alone_and_gone_afterwards(root: Path, runtime_dir: Path) -> None:
    with admin_server(admin_settings(root, runtime_dir)) as server:
        path = server.running.socket_path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.name == "admin.sock"
    assert not path.exists()


def test_a_dead_servers_socket_is_replaced(root: Path, runtime_dir: Path, versions: list[str]) -> None:
    settings = admin_settings(root, runtime_dir)
    runtime_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(runtime_dir / "admin.sock"))
    with admin_server(settings), AdminClient.connect(settings) as admin:
        assert len(admin.models().versions) == 4


def test_a_socket_below_odd_names_works(root: Path, runtime_dir: Path, versions: list[str]) -> None:
    settings = admin_settings(root, runtime_dir).model_copy(update={"runtime_dir": runtime_dir / "a %41#?b"})
    with admin_server(settings), AdminClient.connect(settings) as admin:
        assert admin.traffic("m").traffic.current == versions[0]


def test_any_living_gateway_will_do(root: Path, runtime_dir: Path, versions: list[str]) -> None:
    settings = admin_settings(root, runtime_dir)
    with admin_server(settings, index=3) as server, AdminClient.connect(settings) as admin:
        assert server.running.socket_path.name == "admin-3.sock"
        assert admin.traffic("m").traffic.current == versions[0]


def test_without_a_server_the_sentence_names_the_setting(root: Path, runtime_dir: Path) -> None:
    with pytest.raises(NoServer, match=r"no server runs here.*runtime_dir") as caught:
        AdminClient.connect(admin_settings(root, runtime_dir))
    assert caught.value.exit_code == ExitCode.PEER_LOST
    assert not runtime_dir.exists()  # looking leaves no trace


def test_a_folder_that_others_can_write_to_is_not_trusted(root: Path, runtime_dir: Path) -> None:
    runtime_dir.mkdir()
    runtime_dir.chmod(0o777)
    with pytest.raises(StartupError, match="runtime_dir"):
        AdminClient.connect(admin_settings(root, runtime_dir))


async def test_the_public_port_knows_no_method_of_it() -> None:
    names = [method.name for method in pb.DESCRIPTOR.services_by_name["Admin"].methods]
    assert len(names) == 12
    async with (
        serving(Flow(), State(), public_settings()) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        for name in names:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/{name}")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_tells_of_the_service_on_its_own_socket(server: AdminThread) -> None:
    with grpc.insecure_channel(target_of(server.running.socket_path)) as channel:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        names = {each.name for each in next(iter(answers)).list_services_response.service}
    assert SERVICE in names
    assert "headrace.v1.Inference" not in names


# ---------------------------------------------------------------- what is shown


def test_all_versions_are_listed_with_what_they_are_and_use(admin: AdminClient, versions: list[str]) -> None:
    found = admin.models()
    assert [each.model for each in found.versions] == ["m", "m", "m", "other"]
    by_version = {each.version: each for each in found.versions}
    current = by_version[versions[0]]
    assert (current.role, current.phase, current.share, current.uses) == ("current", "ready", 100.0, 7)
    assert (current.memory_bytes, current.stages_s) == (1_000_000, {"read": 0.2, "build": 0.3})
    assert (by_version[versions[1]].role, by_version[versions[1]].phase) == ("", "")
    assert [(each.worker, each.budget_bytes) for each in found.memory] == [("worker-0", 4_000_000)]


def test_a_model_is_told_whole(admin: AdminClient, versions: list[str]) -> None:
    found = admin.model("m")
    owners = {each.state.version: each.meta["owner"] for each in found.versions if each.meta}
    assert owners == {version: f"owner {number}" for number, version in enumerate(versions)}
    assert all(each.state.stored_bytes > 0 for each in found.versions)
    assert found.traffic.current == versions[0]
    assert [entry["action"] for entry in found.traffic.history] == ["switch"]


def test_a_version_that_can_not_be_read_says_why(admin: AdminClient, root: Path, versions: list[str]) -> None:
    path = root / "m" / "versions" / versions[2] / "meta.json"
    path.chmod(0o600)
    path.write_text("{")
    fault = {each.state.version: each.fault for each in admin.model("m").versions}[versions[2]]
    assert "meta.json" in fault
    assert str(root) not in fault


def test_a_model_is_told_whole_although_its_traffic_json_is_broken(
    admin: AdminClient, server: AdminThread, root: Path, versions: list[str]
) -> None:
    server.control.hidden.add("m")  # after a start: it can't be served
    shutil.rmtree(root / "m" / "versions" / versions[0])
    found = {each.state.version: each.fault for each in admin.model("m").versions}
    assert found == {
        versions[0]: f"m/versions/{versions[0]}: is missing; {way_out('m')}",
        versions[1]: "",
        versions[2]: "",
    }
    (root / "m" / "traffic.json").write_text("{")
    model = admin.model("m")
    assert sorted(each.state.version for each in model.versions) == sorted(versions[1:])
    assert model.fault.startswith("m/traffic.json: ")
    assert (model.pipeline, model.backend) == ("tensor", "simulated")


@pytest.mark.parametrize("name", ["nobody", "a" * 128])
def test_an_unknown_model_is_told_as_such(admin: AdminClient, name: str) -> None:
    for ask in (admin.model, admin.traffic, admin.load, admin.unload, admin.promote):
        with pytest.raises(UnknownModel):
            ask(name)


@pytest.mark.parametrize("name", ["", "../m", "/etc", "a/b", "ü", "a\0", "http://x/y", "a..b", "x" * 10_000])
def test_what_is_no_name_is_refused_everywhere(admin: AdminClient, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: admin.model(name),
        lambda: admin.traffic(name),
        lambda: admin.load(name),
        lambda: admin.unload(name),
        lambda: admin.promote(name),
        lambda: admin.remove_version(name, "0" * 16),
        lambda: admin.diff(name, "", "0" * 16),
        lambda: admin.add_version(name, {}),
    ]
    if name:  # here an empty one means all
        calls += [
            lambda: list(admin.verify(name)),
            lambda: admin.collect_garbage(name),
            lambda: next(admin.watch(name)),
        ]
    for call in calls:
        with pytest.raises(InvalidInput):
            call()


# ---------------------------------------------------------------- traffic


def test_canary_share_promote_and_rollback(admin: AdminClient, server: AdminThread, versions: list[str]) -> None:
    old, new, _ = versions
    after = admin.canary("m", Canary(version=new, percent=5))
    assert after.canary is not None
    assert (after.current, after.canary.version, after.canary.percent) == (old, new, 5.0)
    states = {each.version: each for each in admin.models().versions}
    assert (states[old].share, states[new].share, states[new].role) == (95.0, 5.0, "canary")
    figures = {each.version: each for each in admin.traffic("m").figures}
    assert (figures[new].share, figures[new].requests, figures[new].p99_ms) == (5.0, 100, 20.25)
    assert admin.promote("m").current == new
    after = admin.roll_back("m", "it was wrong")
    assert (after.current, after.standby) == (old, new)
    entry = admin.traffic("m").traffic.history[-1]
    assert (entry["action"], entry["reason"], entry["from"], entry["to"]) == ("rollback", "it was wrong", new, old)
    assert entry["by"] == server.control.ordered[-1][1]
    assert entry["by"].startswith(f"{admin.user} (uid ")


def test_a_rollback_that_comes_late_or_twice_changes_nothing(
    admin: AdminClient, root: Path, versions: list[str]
) -> None:
    old, new, _ = versions
    admin.switch("m", new)
    assert admin.roll_back("m", "once", ends=new).current == old
    before = (root / "m" / "traffic.json").read_bytes()
    with pytest.raises(Conflict, match=f"version {new} is not in force any more; current is {old}"):
        admin.roll_back("m", "once", ends=new)
    assert (root / "m" / "traffic.json").read_bytes() == before


def test_a_standby_is_given_up_and_then_removed(admin: AdminClient, versions: list[str]) -> None:
    old, new, _ = versions
    admin.switch("m", new)
    with pytest.raises(Conflict, match=r"\(standby\).*`headrace traffic m --drop-standby`"):
        admin.remove_version("m", old)
    after = admin.drop_standby("m")
    assert (after.current, after.standby) == (new, "")
    assert after.history[-1]["action"] == "drop_standby"
    assert admin.drop_standby("m") == after, "again, it changes nothing"
    with pytest.raises(Conflict, match="neither a canary nor an earlier version"):
        admin.roll_back("m")
    assert admin.remove_version("m", old) > 0


def test_a_shadow_answers_nobody(admin: AdminClient, versions: list[str]) -> None:
    admin.canary("m", Canary(version=versions[1], percent=30, shadow=True))
    states = {each.version: each for each in admin.models().versions}
    assert (states[versions[0]].share, states[versions[1]].share) == (100.0, 30.0)
    assert states[versions[1]].role == "shadow"


def test_a_ramp_starts_with_its_first_step(admin: AdminClient, versions: list[str]) -> None:
    ramp = Ramp(steps=[5, 25, 100], every_s=600)
    after = admin.canary("m", Canary(version=versions[1], percent=5, by="request_id", ramp=ramp)).canary
    assert after is not None
    assert (after.percent, after.by) == (5.0, "request_id")
    assert after.ramp is not None
    assert (after.ramp.steps, after.ramp.every_s, after.ramp.step) == ([5.0, 25.0, 100.0], 600.0, 0)
    assert after.ramp.next_at_s > 1.7e9


@pytest.mark.parametrize(
    ("percent", "steps", "every_s", "told"),
    [
        (0.0, [], 0, "percent is 0"),
        (101.0, [], 0, "percent is 101"),
        (float("nan"), [], 0, "percent is nan"),
        (5.0, [5, 5], 60, "must rise"),
        (5.0, [5, 25], 0.5, "every is 0.5 s"),
        (5.0, [5, 25], float("nan"), "every is nan"),
        (5.0, [5, 25], float("inf"), "every is inf"),
        (7.0, [5, 25], 60, "starts with 5"),
        (1.0, list(range(1, 102)), 60, "1 to 100 steps"),
    ],
)
def test_a_share_that_makes_no_sense_is_refused(
    admin: AdminClient, versions: list[str], percent: float, steps: list[float], every_s: float, told: str
) -> None:
    ramp = Ramp(steps=steps, every_s=every_s) if steps else None
    with pytest.raises(InvalidOption, match=told):
        admin.canary("m", Canary(version=versions[1], percent=percent, ramp=ramp))
    assert admin.traffic("m").traffic.canary is None


def test_orders_that_can_not_be_carried_out_change_nothing(admin: AdminClient, root: Path, versions: list[str]) -> None:
    before = (root / "m" / "traffic.json").read_bytes()
    with pytest.raises(Conflict, match="no canary"):
        admin.promote("m")
    with pytest.raises(Conflict, match="neither a canary nor an earlier version"):
        admin.roll_back("m")
    with pytest.raises(UnknownVersion):
        admin.switch("m", "0" * 16)
    with pytest.raises(UnknownVersion, match=r"switch\.version is"):
        admin.switch("m", "../../x")
    with pytest.raises(InvalidInput, match="reason has 501"):
        admin.roll_back("m", "x" * 501)
    assert (root / "m" / "traffic.json").read_bytes() == before


def test_an_order_without_content_and_a_name_that_can_not_be_printed_are_refused(server: AdminThread) -> None:
    with grpc.insecure_channel(target_of(server.running.socket_path)) as channel:
        stub = pb_grpc.AdminStub(channel)
        for request, told in (
            (pb.SetTrafficRequest(model="m"), "no order"),
            (pb.SetTrafficRequest(model="m", user="\n", promote=pb.Promote()), "user is"),
            (pb.SetTrafficRequest(model="m", user="u" * 65, promote=pb.Promote()), "user is"),
            (pb.SetTrafficRequest(model="m", canary=pb.Canary(version="0" * 16, percent=1, by="ip")), r"canary\.by is"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.SetTraffic(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
            assert told.replace("\\", "") in caught.value.details()  # type: ignore[attr-defined]


def test_an_order_goes_on_when_its_caller_leaves(admin: AdminClient, server: AdminThread, versions: list[str]) -> None:
    async def close_gate() -> asyncio.Event:
        server.control.gate = asyncio.Event()
        return server.control.gate

    gate = server.do(close_gate())
    with grpc.insecure_channel(target_of(server.running.socket_path)) as channel:
        request = pb.SetTrafficRequest(model="m", switch=pb.Switch(version=versions[1]))
        call = pb_grpc.AdminStub(channel).SetTraffic.future(request)
        _until("the order has arrived", lambda: bool(server.control.ordered))
        call.cancel()
    server.call(gate.set)
    _until("it was carried out", lambda: admin.traffic("m").traffic.current == versions[1])


def test_load_and_unload(admin: AdminClient, server: AdminThread, versions: list[str]) -> None:
    admin.unload("m")
    assert {each.phase for each in admin.models().versions if each.model == "m"} == {"unloaded", ""}
    assert [each.phase for each in admin.load("m")] == ["ready"]
    assert server.control.loads == ["m"]


def test_what_fails_unexpectedly_is_told_without_its_words(admin: AdminClient, server: AdminThread) -> None:
    server.control.fail = RuntimeError("a secret")  # type: ignore[assignment]
    with pytest.raises(Exception, match="internal error; the request id finds it") as caught:
        admin.load("m")
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------- versions


def _files(tmp_path: Path, *contents: bytes) -> dict[str, Path]:
    found = {}
    for number, content in enumerate(contents):
        path = tmp_path / f"new-{number}"
        path.write_bytes(content)
        found[f"part/{number}.json"] = path
    return found


def _left(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def test_a_version_is_taken_in_under_its_hash_and_gets_no_traffic(
    admin: AdminClient, root: Path, tmp_path: Path, versions: list[str]
) -> None:
    files = _files(tmp_path, b"a" * 3_000_000, b"b")
    meta = {"owner": "us", "metrics": {"accuracy": 0.5}, "hyperparameters": {"layers": 3}, "parent": versions[0]}
    added = admin.add_version("m", files, meta)
    found = Repository(root).open("m", added.version)
    Repository.verify(found)
    assert (found.files / "part/0.json").read_bytes() == b"a" * 3_000_000
    assert (found.meta.owner, found.meta.metrics, found.meta.hyperparameters) == (
        "us",
        {"accuracy": 0.5},
        {"layers": 3},
    )
    assert not added.present
    assert admin.add_version("m", files).present
    assert admin.traffic("m").traffic.current == versions[0]
    assert _left(root) == []


def test_the_first_two_versions_of_a_model_keep_the_first_current(
    admin: AdminClient, root: Path, tmp_path: Path
) -> None:
    (root / "new").mkdir()
    (root / "new" / "model.yaml").write_text(MODEL)
    first = admin.add_version("new", _files(tmp_path, b"1")).version
    admin.add_version("new", _files(tmp_path, b"2"))
    assert Repository(root).current("new") == first


@pytest.mark.parametrize("name", ["../x", "/x", "meta.json", "a//b", ".hidden", "a\\b", "", "x" * 600])
def test_files_with_names_that_lead_elsewhere_are_refused(admin: AdminClient, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="can't be a file of a version"):
        admin.add_version("m", {name: _files(tmp_path, b"1")["part/0.json"]})


def test_pickles_are_refused_and_no_path_of_the_server_is_told(admin: AdminClient, root: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94(K\x01e.")
    before = Repository(root).versions("m")
    with pytest.raises(Conflict, match=r"weights\.safetensors.*pickle") as caught:
        admin.add_version("m", {"weights.safetensors": path})
    assert str(root) not in caught.value.text
    assert ".new-" not in caught.value.text
    assert Repository(root).versions("m") == before
    assert _left(root) == []


def _header(*sizes: int, **fields: object) -> pb.AddVersionRequest:
    files = [pb.NewFile(name=f"{number}.json", size=size) for number, size in enumerate(sizes)]
    return pb.AddVersionRequest(header=pb.AddVersionHeader(model="m", files=files, **fields))  # type: ignore[arg-type]


BROKEN = [
    ([], "first message"),
    ([pb.AddVersionRequest(chunk=b"x")], "first message"),
    ([_header()], "names 0 files"),
    ([_header(0)], "is empty"),
    ([_header(2), pb.AddVersionRequest(chunk=b"x")], "ended 1 bytes before"),
    ([_header(1), pb.AddVersionRequest(chunk=b"xy")], "more bytes came"),
    ([_header(1), pb.AddVersionRequest(chunk=b"x"), pb.AddVersionRequest(chunk=b"y")], "more bytes came"),
    ([_header(1), pb.AddVersionRequest()], "only chunks"),
    ([_header(1), pb.AddVersionRequest(chunk=b"")], "only chunks"),
    ([_header(1), _header(1)], "only chunks"),
    ([_header(5_000_000), pb.AddVersionRequest(chunk=b"x" * 4_200_000)], "the limit is 4194304"),
    ([_header(2**40)], "the limit is 274877906944"),
    ([_header(2**37)], "are free"),
    ([_header(1, meta=pb.Meta(digest="0"))], r"meta\.digest must not be set"),
    ([_header(1, meta=pb.Meta(owner="x" * 1001))], r"meta\.owner has 1001"),
    ([_header(1, meta=pb.Meta(owner="\x1b[2J"))], "can't be printed"),
    ([_header(1, meta=pb.Meta(parent="x"))], r"meta\.parent is"),
    ([_header(1, meta=pb.Meta(hyperparameters_json="[1]"))], "is not a JSON object"),
    ([_header(1, meta=pb.Meta(hyperparameters_json="[" * 60_000))], "is not a JSON object"),
    ([_header(1, meta=pb.Meta(metrics={"a": float("inf")}))], "must be a finite number"),
    ([_header(1, meta=pb.Meta(metrics={str(n): 1.0 for n in range(101)}))], "has 101 entries"),
]


@pytest.mark.parametrize(("stream", "told"), BROKEN, ids=[told for _, told in BROKEN])
def test_a_stream_that_is_wrong_leaves_nothing(
    server: AdminThread, root: Path, versions: list[str], stream: list[pb.AddVersionRequest], told: str
) -> None:
    with (
        grpc.insecure_channel(target_of(server.running.socket_path)) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        pb_grpc.AdminStub(channel).AddVersion(iter(stream))
    assert told.replace("\\", "") in str(caught.value.details())  # type: ignore[attr-defined]
    assert str(root) not in str(caught.value)
    assert Repository(root).versions("m") == sorted(versions)
    assert _left(root) == []


def test_a_stream_that_breaks_leaves_nothing_and_a_place_for_the_next(
    server: AdminThread, admin: AdminClient, root: Path, tmp_path: Path, versions: list[str]
) -> None:
    for _ in range(3):  # more than there are places
        go_on = threading.Event()

        def parts(go_on: threading.Event = go_on) -> Iterator[pb.AddVersionRequest]:
            yield _header(10)
            yield pb.AddVersionRequest(chunk=b"x")
            go_on.wait(LIMIT_S)

        with grpc.insecure_channel(target_of(server.running.socket_path)) as channel:
            call = pb_grpc.AdminStub(channel).AddVersion.future(parts())
            _until("the spool is there", lambda: len(_left(root)) == 1)
            call.cancel()
            go_on.set()
        _until("the spool is gone", lambda: not _left(root))
    assert Repository(root).versions("m") == sorted(versions)
    assert admin.add_version("m", _files(tmp_path, b"1")).version in Repository(root).versions("m")


def test_a_third_large_call_is_refused_at_once(server: AdminThread, admin: AdminClient, root: Path) -> None:
    go_on = threading.Event()

    def parts() -> Iterator[pb.AddVersionRequest]:
        yield _header(10)
        go_on.wait(LIMIT_S)

    with grpc.insecure_channel(target_of(server.running.socket_path)) as channel:
        calls = [pb_grpc.AdminStub(channel).AddVersion.future(parts()) for _ in range(2)]
        _until("both spools are there", lambda: len(_left(root)) == 2)
        with pytest.raises(Overloaded, match="2 other calls"):
            list(admin.verify())
        for call in calls:
            call.cancel()
        go_on.set()
    _until("the spools are gone", lambda: not _left(root))


def test_what_a_crash_left_is_removed_by_the_next(admin: AdminClient, root: Path, tmp_path: Path) -> None:
    (root / ".new-old").mkdir()
    (root / ".new-old" / "0").write_bytes(b"x")
    admin.add_version("m", _files(tmp_path, b"1"))
    assert _left(root) == []


def test_a_version_in_use_is_not_removed(admin: AdminClient, root: Path, versions: list[str]) -> None:
    admin.canary("m", Canary(version=versions[1], percent=5))
    for used in versions[:2]:
        with pytest.raises(Conflict, match="in use"):
            admin.remove_version("m", used)
    assert admin.remove_version("m", versions[2]) > 0
    with pytest.raises(UnknownVersion):
        admin.remove_version("m", versions[2])
    assert set(Repository(root).versions("m")) == set(versions[:2])


def test_what_the_server_takes_up_while_the_folder_is_locked_is_not_removed(
    server: AdminThread, admin: AdminClient, root: Path, versions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = ModelState(name="m", version=versions[2], role="coming", phase="loading")
    known = server.control.index()
    outcome: list[Exception | int] = []

    def remove() -> None:
        try:
            outcome.append(admin.remove_version("m", versions[2]))
        except Conflict as error:
            outcome.append(error)

    thread = threading.Thread(target=remove)
    with locked(root / "m"):
        thread.start()
        _until("its turn to be waited for", lambda: "admin-disk" in {each.name for each in threading.enumerate()})
        monkeypatch.setattr(server.control, "index", lambda: [*known, coming])
    thread.join(LIMIT_S)
    assert [type(each) for each in outcome] == [Conflict]
    assert "in use by the running server" in str(outcome[0])
    assert versions[2] in Repository(root).versions("m")


def test_garbage_is_told_first_and_then_collected(admin: AdminClient, root: Path, versions: list[str]) -> None:
    told = admin.collect_garbage(dry_run=True, keep=0)
    assert {each.version for each in told.removed} == set(versions[1:])
    assert len(Repository(root).versions("m")) == 3
    assert admin.collect_garbage("m", keep=0) == told
    assert Repository(root).versions("m") == [versions[0]]
    assert admin.collect_garbage().removed == []
    with pytest.raises(InvalidInput, match="keep is 1001"):
        admin.collect_garbage(keep=1001)


def test_every_version_is_verified_and_a_fault_named(admin: AdminClient, root: Path, versions: list[str]) -> None:
    weights = root / "m" / "versions" / versions[1] / "simulated.json"
    weights.chmod(0o600)
    weights.write_text("{}")
    found = list(admin.verify())
    assert [(each.done, each.total) for each in found] == [(number, 4) for number in range(1, 5)]
    faults = {each.version: each.fault for each in found if each.fault}
    assert list(faults) == [versions[1]]
    assert "simulated.json: has changed" in faults[versions[1]]
    assert len(list(admin.verify("other"))) == 1


def test_two_versions_are_compared(admin: AdminClient, versions: list[str]) -> None:
    found = admin.diff("m", "", versions[1])
    assert (found.before, found.after) == (versions[0], versions[1])
    differences = {each.what: (each.before, each.after) for each in found.differences}
    assert differences["owner"] == ("owner 0", "owner 1")
    with pytest.raises(UnknownVersion):
        admin.diff("m", versions[0], "0" * 16)


# ---------------------------------------------------------------- watch


def test_a_watch_tells_the_whole_state_and_then_what_changes(
    admin: AdminClient, server: AdminThread, versions: list[str]
) -> None:
    with contextlib.closing(admin.watch()) as changes:
        first = next(changes)
        assert first.whole
        assert {each.version for each in first.versions} >= {versions[0]}
        assert first.traffic["m"].current == versions[0]
        with AdminClient.connect(server.settings) as other:
            other.canary("m", Canary(version=versions[1], percent=25))
        seen: dict[str, float] = {}
        for change in changes:
            assert not change.whole
            assert not any(each.model == "other" for each in change.versions)
            seen |= {each.version: each.share for each in change.versions}
            if versions[1] in seen:
                break
    assert seen == {versions[0]: 75.0, versions[1]: 25.0}


def test_a_watch_of_one_model_tells_of_that_alone(admin: AdminClient, server: AdminThread) -> None:
    with contextlib.closing(admin.watch("other")) as changes:
        assert {each.model for each in next(changes).versions} == {"other"}


def test_a_slow_reader_gets_the_latest_state_and_nothing_piles_up(
    admin: AdminClient, server: AdminThread, versions: list[str]
) -> None:
    rounds = 2000
    with contextlib.closing(admin.watch("m")) as changes:
        next(changes)

        def many() -> None:
            for number in range(rounds):
                server.control.phases[versions[0]] = "ready" if number % 2 else "proving"
                server.control.changed()
            server.control.phases[versions[0]] = "failed"
            server.control.changed()

        server.call(many)
        told: list[Change] = []
        for change in changes:
            told.append(change)
            if change.versions and change.versions[-1].phase == "failed":
                break
    assert len(told) < rounds / 10


def test_watches_end_with_the_server(root: Path, runtime_dir: Path, versions: list[str]) -> None:
    settings = admin_settings(root, runtime_dir)
    ended = threading.Event()
    with admin_server(settings) as server, AdminClient.connect(settings) as admin:
        changes = admin.watch()
        next(changes)

        def read() -> None:
            with contextlib.suppress(StartupError):
                list(changes)
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        server.do(server.running.close())
        assert ended.wait(LIMIT_S)


def _until(what: str, condition: Callable[[], bool]) -> None:
    eventually(what, condition, LIMIT_S)
