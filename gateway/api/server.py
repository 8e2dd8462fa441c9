"""The gRPC server: its options, its services, its start and its stop. Called by the gateway's composition."""

from typing import Any

import grpc
from google.protobuf.internal import api_implementation

from gateway.api import health as health_service
from gateway.api import native, reflection
from gateway.api.accept import Acceptor, Handler
from gateway.api.addresses import refusal, split
from gateway.api.health import Health
from gateway.api.interceptors import Edge, Gate
from gateway.api.native import Answers, Inference
from gateway.api.open_inference import service as service_of_open_inference
from gateway.api.open_inference.service import OpenInference, OpenInferenceService
from gateway.api.outcomes import Outcomes
from gateway.state import ServerState
from shared.errors import ExitCode, StartupError
from shared.settings import Settings

_LAST_WORDS_S = 0.25
"""After the last call has ended: time for its answer to leave, before what is left (idle streams) is cut."""

_ENVELOPE_BYTES = 64 * 1024
"""gRPC's own receive limit lies this far above ours, so that most too large messages get our sentence, which names the
setting; far larger ones get gRPC's (also RESOURCE_EXHAUSTED), before any of their bytes is read."""

Options = list[tuple[str, Any]]


def server_options(settings: Settings) -> Options:
    """Core options; each one closes a hole that was measured or is on record (docs: RELIABILITY)."""
    most_bytes = settings.gateway.max_message_bytes
    return [
        # Without 0 a second server on the port starts, too, and the kernel splits the traffic between them. Several
        # gateways of one server want just that; their port is guarded otherwise (`shared.held_ports`).
        ("grpc.so_reuseport", int(settings.gateway.processes > 1)),
        # Core throws bursts away as CANCELLED before Python sees them; refusing is admission's business. The bound is
        # far above what admission lets in, and still keeps an endless burst out of memory.
        ("grpc.server.max_pending_requests", 100_000),
        ("grpc.server.max_pending_requests_hard_limit", 200_000),
        # Twice what admission takes: the rest is refused with a status instead of waiting unseen in the client.
        ("grpc.max_concurrent_streams", 2 * settings.admission.max_requests),
        # Streams that have ended and wait to be cleared away count against a limit of their own, and beyond it core
        # refuses new ones with a bare RST_STREAM: of 10,000 calls at once on one channel every fifth to third was lost.
        ("grpc.http2.max_deallocating_streams", 100_000),
        # Larger reads: a call of 602 KB costs a seventh less (docs/decisions/overload.md).
        ("grpc.experimental.tcp_min_read_chunk_size", 64 * 1024),
        ("grpc.max_receive_message_length", most_bytes + _ENVELOPE_BYTES),
        ("grpc.max_send_message_length", max(most_bytes, 64 * 1024 * 1024)),
        ("grpc.max_metadata_size", 8 * 1024),
        ("grpc.absolute_max_metadata_size", 16 * 1024),
        # A client that hangs or vanishes is noticed after at most 10 + 5 s. Without ping_timeout_ms it takes a minute.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients may ping every 5 s; the default of 5 minutes answers honest keepalives with GOAWAY too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # Connections that never say a word, and too many of them.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 600_000),
        ("grpc.max_allowed_incoming_connections", 4096),
    ]


class RunningGrpc:
    """A started server. Event loop only."""

    def __init__(self, server: grpc.aio.Server, address: str, port: int, parts: "Parts") -> None:
        self._server = server
        self.address = address
        """host:port as bound."""
        self.port = port
        self._parts = parts

    @property
    def outcomes(self) -> Outcomes:
        """Every call's end, counted; registrable with a Prometheus registry."""
        return self._parts.outcomes

    def stop_serving(self) -> None:
        """Lame duck: health says NOT_SERVING and balancers look elsewhere; calls are still taken."""
        self._parts.health.stop_serving()

    async def stop(self, grace_s: float) -> None:
        """Stop: health first, then refuse new calls, wait at most `grace_s` for the running ones, then close.

        The port stays open while calls run: we refuse with UNAVAILABLE and a pushback, so that callers wait or go
        elsewhere. Once gRPC itself is told to stop, it ends calls that are on their way with a bare CANCELLED.
        """
        await self.drain(grace_s)
        await self._server.stop(_LAST_WORDS_S)

    async def drain(self, grace_s: float) -> None:
        """The same without closing: for a process that ends next.

        Until its very end it refuses with a reason; then the connections are reset, which a caller sees as UNAVAILABLE,
        while gRPC's own stop would end the calls of the last moment with a bare CANCELLED that nobody tries again.
        """
        self.stop_serving()
        self._parts.inference.drain.start()
        if not await self._parts.outcomes.wait_idle(grace_s):
            self._parts.inference.drain.end()
            await self._parts.outcomes.wait_idle(_LAST_WORDS_S)
        self._parts.health.close()


class Parts:
    """What a running server is made of."""

    def __init__(
        self,
        settings: Settings,
        flow: Answers,
        state: ServerState,
        outcomes: Outcomes,
        open_inference: OpenInference | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.outcomes = outcomes
        self.edge = edge = Edge(settings.gateway, outcomes, gate)
        self.inference = Inference(edge, flow, settings)
        self.services = {native.SERVICE: self.inference.handlers()}
        if open_inference is not None:
            service = OpenInferenceService(edge, open_inference, self.inference.drain)
            self.services[service_of_open_inference.SERVICE] = service.handlers()
        self.health = Health(edge, state, tuple(self.services))
        self.services[health_service.SERVICE] = self.health.handlers()
        if settings.gateway.reflection:
            self.services |= reflection.handlers(edge, tuple(self.services))

    def hot(self) -> dict[str, Handler]:
        """The methods of which there may be thousands a second, by full name."""
        names = ((native.SERVICE, "Predict"), (service_of_open_inference.SERVICE, "ModelInfer"))
        return {
            f"/{service}/{name}": self.services[service][name] for service, name in names if service in self.services
        }


async def start_grpc(
    settings: Settings,
    flow: Answers,
    state: ServerState,
    outcomes: Outcomes | None = None,
    open_inference: OpenInference | None = None,
    gate: Gate | None = None,
) -> RunningGrpc:
    """Bind `gateway.grpc_address` and serve; with `open_inference`, the Open Inference Protocol, too.

    Raises StartupError: IN_USE, or BAD_SETTINGS for an unusable address.
    """
    if api_implementation.Type() != "upb":
        raise StartupError(
            ExitCode.BAD_SETTINGS,
            f"protobuf runs its {api_implementation.Type()} implementation; the gateway needs upb (the other ones "
            "recurse without a limit). Unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION.",
        )
    parts = Parts(settings, flow, state, outcomes or Outcomes(), open_inference, gate)
    server = grpc.aio.server(options=server_options(settings))
    for service, methods in parts.services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    acceptor = Acceptor(server, parts.hot(), parts.edge)
    address = settings.gateway.grpc_address
    host, _ = split(address, "gateway.grpc_address")
    port = _bind(server, address)
    await server.start()
    acceptor.start()
    return RunningGrpc(server, f"{host}:{port}", port, parts)


def _bind(server: grpc.aio.Server, address: str) -> int:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise refusal(address, "gateway.grpc_address")
    return port
