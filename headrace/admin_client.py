"""The blocking client of the admin service, for the command line and for scripts.

    with AdminClient.connect(settings) as admin:
        for version in admin.models().versions:
            print(version.model, version.version, version.role, version.phase)

A failed call raises the same `shared.errors.HeadraceError` as on the server; NoServer when nobody answers. Unlike
`headrace.client` it comes with the server and needs its settings.
"""

import getpass
import json
import os
import stat
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from headrace import admin_results as results
from headrace import admin_wire as wire
from headrace.admin_wire import NoServer
from protos.headrace.v1 import admin_pb2 as pb
from protos.headrace.v1 import admin_pb2_grpc as pb_grpc
from shared.errors import ExitCode, HeadraceError, StartupError
from shared.runtime_dir import RuntimeDir, gateway_role
from shared.settings import MAX_GATEWAYS, Settings
from shared.traffic import Canary, Traffic

CALL_LIMIT_S = 30.0
ORDER_LIMIT_S = 300.0
"""A load is waited for at most two minutes by each gateway, one set after the other."""
CONNECT_LIMIT_S = 3.0


class AdminClient:
    """Calls one server's admin service; closed by `close` or by leaving `with`."""

    def __init__(self, channel: grpc.Channel, token: str = "", user: str = "") -> None:
        """Use `connect`. `user`: the name in the history; default: this process's user."""
        self._channel = channel
        self._stub = pb_grpc.AdminStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.user = user or _user()

    @classmethod
    def connect(cls, target: Settings | str, token: str = "", ca: bytes | None = None) -> Self:
        """The server of this machine with these settings, by its socket; or, of a host:port, by TCP with TLS.

        `ca`: PEM certificates that the server's is signed by; default: those that the system trusts. Raises NoServer,
        StartupError (BAD_SETTINGS) for a runtime folder that is somebody else's.
        """
        if not isinstance(target, str):
            return cls(_local_channel(target))
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(ca), options=_OPTIONS)
        client = cls(channel, token)
        if not _answers(channel):
            client.close()
            raise NoServer(
                ExitCode.PEER_LOST,
                f"no admin service answers at {target}: is it the server's admin.address, and its certificate made for "
                "that name and signed by --ca?",
            )
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    # ------------------------------------------------------------ shown

    def models(self) -> results.Models:
        """Every version that is stored or served."""
        return wire.plain(self._call(self._stub.ListModels, pb.ListModelsRequest()), results.Models)

    def model(self, name: str) -> results.Model:
        """One model. Raises UnknownModel."""
        found = self._call(self._stub.GetModel, pb.GetModelRequest(model=name))
        versions = [
            results.Version(
                state=wire.plain(each.state, results.VersionState),
                meta=wire.meta(each.meta) if each.HasField("meta") else None,
                fault=each.fault,
                file_bytes=dict(each.file_bytes),
            )
            for each in found.versions
        ]
        traffic = wire.traffic(found.traffic)
        return results.Model(found.model, versions, traffic, found.fault, found.pipeline, found.backend)

    def traffic(self, name: str) -> results.TrafficNow:
        """Who is answered by which version, and how well. Raises UnknownModel."""
        found = self._call(self._stub.GetTraffic, pb.GetTrafficRequest(model=name))
        figures = [wire.plain(each, results.VersionFigures) for each in found.figures]
        coming = wire.traffic(found.coming) if found.HasField("coming") else None
        return results.TrafficNow(wire.traffic(found.traffic), figures, coming, found.refused, found.unwritten)

    def watch(self, name: str = "") -> Iterator[results.Change]:
        """The state whole, then what changes, until the server stops. `name`: only this model."""
        for message in self._stream(self._stub.Watch(pb.WatchRequest(model=name), metadata=self._metadata)):
            yield results.Change(
                whole=message.whole,
                versions=[wire.plain(each, results.VersionState) for each in message.versions],
                removed=[wire.plain(each, results.VersionState) for each in message.removed],
                traffic={each.model: wire.traffic(each.traffic) for each in message.traffic},
                memory=[wire.plain(each, results.WorkerMemory) for each in message.memory],
            )

    # ------------------------------------------------------------ traffic and service

    def switch(self, name: str, version: str) -> Traffic:
        """All callers to this version. Raises HeadraceError."""
        return self._order(name, switch=pb.Switch(version=version))

    def canary(self, name: str, canary: Canary) -> Traffic:
        """A share to a version; a ramp's times are the server's. Raises HeadraceError."""
        message = pb.Canary(version=canary.version, percent=canary.percent, by=canary.by, shadow=canary.shadow)
        if canary.ramp is not None:
            message.ramp.steps.extend(canary.ramp.steps)
            message.ramp.every_s = canary.ramp.every_s
        return self._order(name, canary=message)

    def promote(self, name: str) -> Traffic:
        """The canary becomes current. Raises HeadraceError."""
        return self._order(name, promote=pb.Promote())

    def roll_back(self, name: str, reason: str = "", ends: str = "") -> Traffic:
        """End the canary, or go back to the version before. Raises HeadraceError.

        `ends`: the version that is to end, whole; Conflict when something else is in force by now. Empty: what is in
        force as this looks; Conflict when that is so by a rollback. It may be written later: `traffic` says if so.
        """
        return self._order(name, rollback=pb.RollBack(reason=reason, ends=ends or self.traffic(name).ending))

    def drop_standby(self, name: str) -> Traffic:
        """Give up the version to go back to. Raises HeadraceError."""
        return self._order(name, drop_standby=pb.DropStandby())

    def load(self, name: str) -> list[results.VersionState]:
        """Serve a model as its files say now. Raises HeadraceError."""
        found = self._call(self._stub.Load, pb.LoadRequest(model=name, user=self.user), ORDER_LIMIT_S)
        return [wire.plain(each, results.VersionState) for each in found.versions]

    def unload(self, name: str) -> None:
        """Take a model out of service. Raises HeadraceError."""
        self._call(self._stub.Unload, pb.UnloadRequest(model=name, user=self.user), ORDER_LIMIT_S)

    def _order(self, name: str, **order: Any) -> Traffic:  # noqa: ANN401 - protobuf checks each field
        request = pb.SetTrafficRequest(model=name, user=self.user, **order)
        return wire.traffic(self._call(self._stub.SetTraffic, request, ORDER_LIMIT_S).traffic)

    # ------------------------------------------------------------ versions

    def add_version(self, name: str, files: Mapping[str, Path], meta: Mapping[str, Any] | None = None) -> results.Added:
        """Send files (name in the version → file here) as a version. Raises HeadraceError, OSError.

        `meta`: fields of meta.json: source, licence, owner, parent, data_version, hyperparameters, metrics.
        """
        fields = dict(meta or {})
        parameters = fields.pop("hyperparameters", {})
        header = pb.AddVersionHeader(
            model=name,
            files=[pb.NewFile(name=each, size=path.stat().st_size) for each, path in files.items()],
            meta=pb.Meta(**fields, hyperparameters_json=json.dumps(parameters) if parameters else ""),
            user=self.user,
        )
        broken: list[OSError] = []
        parts = wire.parts(header, files.values(), broken)
        try:
            return wire.plain(self._call(self._stub.AddVersion, parts, None), results.Added)
        except HeadraceError:
            if broken:  # gRPC's thread read the files
                raise broken[0] from None
            raise

    def remove_version(self, name: str, version: str) -> int:
        """Delete a version that is not in use; returns the bytes that it had. Raises HeadraceError."""
        request = pb.RemoveVersionRequest(model=name, version=version, user=self.user)
        return int(self._call(self._stub.RemoveVersion, request, ORDER_LIMIT_S).freed_bytes)

    def verify(self, name: str = "") -> Iterator[results.Verified]:
        """Every version hashed again, one after another. Raises HeadraceError."""
        for message in self._stream(self._stub.Verify(pb.VerifyRequest(model=name), metadata=self._metadata)):
            yield wire.plain(message, results.Verified)

    def collect_garbage(self, name: str = "", *, dry_run: bool = False, keep: int | None = None) -> results.Collected:
        """Delete versions that nothing needs, of one model or all; `keep` the newest. Raises HeadraceError."""
        request = pb.CollectGarbageRequest(model=name, dry_run=dry_run, keep=keep, user=self.user)
        return wire.plain(self._call(self._stub.CollectGarbage, request, None), results.Collected)

    def diff(self, name: str, before: str, after: str) -> results.Diff:
        """What two versions differ in; an empty `before` is the current one. Raises HeadraceError."""
        request = pb.DiffRequest(model=name, from_version=before, to_version=after)
        return wire.diff(self._call(self._stub.Diff, request))

    # ------------------------------------------------------------ calls

    def _call(self, method: Any, request: Any, limit_s: float | None = CALL_LIMIT_S) -> Any:  # noqa: ANN401 - any method of the stub
        try:
            return method(request, timeout=limit_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.error(error) from None

    def _stream(self, call: Any) -> Iterator[Any]:  # noqa: ANN401 - any call of the stub
        try:
            yield from call
        except grpc.RpcError as error:
            raise wire.error(error) from None
        finally:
            call.cancel()


_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # answers are the server's to bound
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),  # an admin service is reached directly, or not at all
]


def _user() -> str:
    """This process's user, as the service takes it: printable ASCII, at most 64."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # no name for the user id
        return ""
    return "".join(char for char in name if " " <= char <= "~")[:64]


def _answers(channel: grpc.Channel) -> bool:
    try:
        grpc.channel_ready_future(channel).result(CONNECT_LIMIT_S)
    except grpc.FutureTimeoutError:
        return False
    return True


def _local_channel(settings: Settings) -> grpc.Channel:
    """A channel to the first living gateway. Raises NoServer, StartupError."""
    runtime = RuntimeDir(RuntimeDir.place(settings.runtime_dir))
    _check_folder(runtime.path)
    living = [index for index in range(MAX_GATEWAYS) if runtime.is_held(gateway_role(index))]
    for index in living:
        path = runtime.admin_socket(index)
        if not path.is_socket():
            continue
        channel = grpc.insecure_channel("unix:" + urllib.parse.quote(os.fspath(path)), options=_OPTIONS)
        if _answers(channel):
            return channel
        channel.close()
    for index in living:
        if (pid := _stopped(runtime, index)) is not None:
            raise StartupError(
                ExitCode.PEER_LOST,
                f"the server's {gateway_role(index)} is stopped and answers nobody: `kill -CONT {pid}` lets it go on",
            )
    if living:
        raise StartupError(
            ExitCode.PEER_LOST, "the server is starting or stopping and takes no orders now: try again in a moment"
        )
    raise NoServer(
        ExitCode.PEER_LOST,
        "no server runs here: start one with `headrace serve`, or give the settings of the one that runs "
        f"(--config; it is looked for in runtime_dir, {runtime.path})",
    )


def _stopped(runtime: RuntimeDir, index: int) -> int | None:
    """The process id of a gateway that a signal has stopped (SIGSTOP, Ctrl-Z); None: it is not."""
    try:
        pid = int((runtime.path / f"{gateway_role(index)}.lock").read_text())
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):  # it is gone, or just coming
        return None
    return pid if state in {"T", "t"} else None


def _check_folder(path: Path) -> None:
    """A folder that is somebody else's could hold anybody's socket. Raises StartupError."""
    try:
        found = path.lstat()
    except OSError:  # not there: nobody runs
        return
    if os.geteuid() not in {0, found.st_uid} or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise StartupError(
            ExitCode.BAD_SETTINGS, f"runtime_dir {path} is not a folder of this user's alone; set runtime_dir"
        )
