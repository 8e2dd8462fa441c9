"""The admin service's own listeners: a Unix socket in the runtime folder, and TCP only with TLS and a token.

Each has a gRPC server of its own, so that no call of the network can reach methods past the token's check.
"""

import hmac
import os
import ssl
import stat
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from gateway.api import admin, reflection, status
from gateway.api.accept import Handler
from gateway.api.addresses import refusal, split
from gateway.api.admin import Admin
from gateway.api.admin_upload import MAX_CHUNK_BYTES
from gateway.api.interceptors import Context, Edge
from gateway.api.outcomes import Outcomes
from gateway.api.server import Options
from shared.errors import ExitCode, StartupError
from shared.settings import Settings

MAX_CALLS = 64
"""Calls at a time on each listener, watches included; gRPC itself refuses more with RESOURCE_EXHAUSTED."""
MAX_CONNECTIONS = 64
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + 1024 * 1024
"""A chunk with its envelope, or a header that names a thousand files."""
MIN_TOKEN, MAX_TOKEN = 16, 4096
"""Characters. gRPC's own limit of metadata is 8 KB."""
_LAST_WORDS_S = 0.25

_REFUSED = "this service needs a valid token: send `authorization: Bearer <token>`"


class RunningAdmin:
    """The started listeners. Event loop only."""

    def __init__(self, servers: Sequence[grpc.aio.Server], socket_path: Path, servicer: Admin, port: int) -> None:
        self._servers = servers
        self._servicer = servicer
        self.socket_path = socket_path
        self.port = port
        """Of `admin.address`; 0: not on TCP."""

    async def close(self) -> None:
        """End watches, give running calls a moment, close, and remove the socket. Orders under way go on."""
        self._servicer.close()
        for server in self._servers:
            await server.stop(_LAST_WORDS_S)
        _remove(self.socket_path)


class Tls(NamedTuple):
    """What a TCP listener needs."""

    credentials: grpc.ServerCredentials
    token: bytes


async def start_admin(settings: Settings, socket_path: Path, servicer: Admin, *, on_tcp: bool = True) -> RunningAdmin:
    """Listen on the socket, and with `on_tcp` on `admin.address`, if there is one.

    The caller holds the lock of the role that the socket belongs to: one that lies there is a dead process's.
    Raises StartupError: IN_USE, or BAD_SETTINGS naming the setting.
    """
    tls = _tls(settings) if settings.admin.address and on_tcp else None
    quiet = settings.gateway.model_copy(update={"max_message_bytes": MAX_MESSAGE_BYTES})
    edge = Edge(quiet, Outcomes())
    services = {admin.SERVICE: servicer.handlers(edge)}
    if settings.gateway.reflection:
        services |= reflection.handlers(edge, tuple(services))
    servers, port = [_on_socket(services, socket_path)], 0
    try:
        if tls is not None:
            server, port = _on_tcp(services, settings.admin.address, tls)
            servers.append(server)
        for each in servers:
            await each.start()
    except BaseException:
        for each in servers:
            await each.stop(None)
        _remove(socket_path)
        raise
    return RunningAdmin(servers, socket_path, servicer, port)


def _remove(socket_path: Path) -> None:
    socket_path.unlink(missing_ok=True)


def target_of(socket_path: Path) -> str:
    """A Unix socket's name as gRPC reads it, which takes it for a URI."""
    return "unix:" + urllib.parse.quote(os.fspath(socket_path))


def _server(services: dict[str, dict[str, Handler]], interceptors: Sequence[Any] = ()) -> grpc.aio.Server:
    server = grpc.aio.server(options=_options(), interceptors=interceptors, maximum_concurrent_rpcs=MAX_CALLS)
    for service, methods in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    return server


def _options() -> Options:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 2 * MAX_CALLS),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 8 * 1024),
        ("grpc.absolute_max_metadata_size", 16 * 1024),
        # As on the inference services' port, see `gateway.api.server`.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 600_000),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ]


def _on_socket(services: dict[str, dict[str, Handler]], path: Path) -> grpc.aio.Server:
    server = _server(services)
    path.unlink(missing_ok=True)
    try:
        bound = server.add_insecure_port(target_of(path))
    except RuntimeError:
        bound = 0
    if not bound:
        raise StartupError(ExitCode.BAD_SETTINGS, "runtime_dir: the admin service's socket can't be made", str(path))
    path.chmod(0o600)  # nobody could come in between: the folder is 0700
    return server


def _on_tcp(services: dict[str, dict[str, Handler]], address: str, tls: Tls) -> tuple[grpc.aio.Server, int]:
    server = _server(services, (TokenCheck(tls.token),))
    split(address, "admin.address")
    try:
        port = server.add_secure_port(address, tls.credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise refusal(address, "admin.address")
    return server, port


class TokenCheck(grpc.aio.ServerInterceptor):
    """Ends every call without the token before its message is read, whichever method it names."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._refusing: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The method, or what refuses it."""
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == "authorization"]
        if len(given) == 1 and self._is_right(given[0]):
            return await continuation(handler_call_details)
        return self._refusing

    def _is_right(self, value: str | bytes) -> bool:
        whole = value.encode() if isinstance(value, str) else value
        scheme, _, token = whole.partition(b" ")
        return hmac.compare_digest(token, self._token) and scheme.lower() == b"bearer"


async def _refuse(_requests: object, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSED, ((status.REASON, "unauthenticated"),))


def _tls(settings: Settings) -> Tls:
    given = settings.admin
    if given.certificate is None or given.key is None or given.token_file is None:  # the settings have checked that
        raise StartupError(ExitCode.BAD_SETTINGS, "admin.address needs certificate, key and token_file")
    token = _token(given.token_file)
    certificate = _read(given.certificate, "admin.certificate")
    key = _private(given.key, "admin.key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(given.certificate, given.key, password=lambda: "")
    except (OSError, ValueError) as error:
        why = _why_not(certificate, key) or getattr(error, "reason", None) or "they can't be read"
        raise StartupError(
            ExitCode.BAD_SETTINGS, f"admin.certificate and admin.key are not a PEM certificate and its key ({why})"
        ) from None
    return Tls(grpc.ssl_server_credentials([(key, certificate)]), token)


def _why_not(certificate: bytes, key: bytes) -> str | None:
    """What the TLS library's own words leave open."""
    for name, content in (("admin.certificate", certificate), ("admin.key", key)):
        if b"-----BEGIN" not in content:
            return f"{name} is no PEM file"
    return "the key is encrypted" if b"ENCRYPTED" in key else None


def _token(path: Path) -> bytes:
    text = _private(path, "admin.token_file").removesuffix(b"\n").removesuffix(b"\r")
    if not MIN_TOKEN <= len(text) <= MAX_TOKEN or not all(0x21 <= byte <= 0x7E for byte in text):
        raise StartupError(
            ExitCode.BAD_SETTINGS,
            f"admin.token_file must hold one line of {MIN_TOKEN} to {MAX_TOKEN} printable ASCII characters without "
            "spaces, e.g. from: openssl rand -hex 32",
            str(path),
        )
    return text


def _private(path: Path, setting: str) -> bytes:
    content = _read(path, setting)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StartupError(ExitCode.BAD_SETTINGS, f"{setting} can be read by others: chmod 600 it", str(path))
    return content


def _read(path: Path, setting: str) -> bytes:
    """A small file. Raises StartupError."""
    try:
        with path.open("rb") as file:
            return file.read(1024 * 1024)
    except OSError as error:
        raise StartupError(ExitCode.BAD_SETTINGS, f"{setting} can't be read ({error.strerror})", str(path)) from None
