"""The server's settings: grouped by consumer, frozen, unit in every name. Used by all processes.

How a value is found, and how a mistake is reported, is in `shared.settings_loader`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shared.settings_base import (
    Address,
    AdminSettings,
    Bytes,
    CacheSettings,
    Folder,
    Group,
    GuardSettings,
    Milliseconds,
)

Rows = Annotated[int, Field(ge=1, le=4096)]
"""Of one batch."""
Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""Of one batch: rows times their length."""
Weight = Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)]
"""Of one model, against the others."""
MAX_WORKERS = 64
MAX_GATEWAYS = 16
STOP_REST_MS = 3_500
"""Of a stop, beside `gateway.drain_ms`: a gateway closes its admin listeners (half a second), HTTP (a second, and
something) and its pool (a second), and after the gateways the workers end."""
_ROWS = TypeAdapter(Rows)


class LogSettings(Group):
    """Structured logs on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: console on a terminal, JSON lines otherwise."""


class GatewaySettings(Group):
    """The processes that listen."""

    processes: Annotated[int, Field(ge=1, le=MAX_GATEWAYS)] = 1
    """How many share the two ports: each client connection belongs to one of them. `arena.budget_bytes`,
    `pool.processes` and the limits of `admission` are of all together; each gets its share, at least one pool process.
    """
    grpc_address: Address = "127.0.0.1:8001"
    """host:port of the gRPC services; port 0 takes a free one."""
    http_address: Address = "127.0.0.1:8000"
    """host:port of health, metrics and debug; port 0 takes a free one."""
    reflection: bool = True
    """Lets grpcurl and other clients call without a .proto file."""
    max_message_bytes: Bytes = 64 * 1024 * 1024
    """Largest request message; larger ones are RESOURCE_EXHAUSTED."""
    default_deadline_ms: Milliseconds = 10_000
    """For calls without a gRPC deadline."""
    max_deadline_ms: Milliseconds = 600_000
    """A longer client deadline is cut to this."""
    stream_in_flight: Annotated[int, Field(ge=1, le=4096)] = 64
    """Requests of one PredictStream worked on at a time."""
    repository_control: bool = False
    """Lets clients of the Open Inference Protocol load and unload models, on the public port."""
    system_shared_memory_prefix: Annotated[str, Field(pattern=r"^/?([A-Za-z0-9_][A-Za-z0-9._-]{0,63})?$")] = ""
    """Clients on this machine may lay tensors into POSIX shared memory objects whose name begins so; empty: off, `/`:
    every object that this process may open."""
    drain_ms: Milliseconds = 3_000
    """After SIGTERM: how long requests in flight may finish."""


class AdmissionSettings(Group):
    """What may be in the server at one time; beyond it calls are refused with RESOURCE_EXHAUSTED."""

    max_requests: Annotated[int, Field(ge=1)] = 2048
    max_rows: Annotated[int, Field(ge=1)] = 4096
    max_bytes: Bytes = 256 * 1024 * 1024
    """Payload bytes of all admitted requests together."""
    max_inputs_per_request: Annotated[int, Field(ge=1)] = 256


class ArenaSettings(Group):
    """Shared memory between the gateway, its pool and the workers."""

    budget_bytes: Annotated[int, Field(ge=1024 * 1024)] = 256 * 1024 * 1024
    """Allocated at start, in full; rounded up to a power of two."""
    inline_bytes: Annotated[int, Field(ge=0)] = 16 * 1024
    """Payloads up to this size travel inside the message."""


class PoolSettings(Group):
    """The processes that decode, resize, tokenise and postprocess."""

    processes: Annotated[int, Field(ge=1, le=256)] | None = None
    """Default: one per CPU core."""
    job_limit_ms: Milliseconds = 5_000
    """A job that takes longer loses its process; once its caller has left, half a second in all is the limit."""
    max_pixels: Annotated[int, Field(ge=1)] = 50_000_000
    """Largest image, width × height, checked before decoding."""
    memory_bytes: Annotated[int, Field(ge=256 * 1024 * 1024)] = 2 * 1024 * 1024 * 1024
    """Address space of one process beyond what it has at start."""
    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Scheduling priority below the gateway's: with more load than cores it is the pool that waits, and the gateway
    still refuses in time what can't be served. 0: no lower than the gateway's."""
    recycle_jobs: Annotated[int, Field(ge=1)] = 100_000
    """A process is replaced after this many jobs, so that a leak in a decoder stays small."""


class BatchingSettings(Group):
    """Defaults for every model; `batching:` in model.yaml overrides them."""

    max_rows: Rows = 32
    max_wait_ms: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)] = 5.0
    """How long a row may wait for company while the worker could run it."""
    sizes: tuple[Rows, ...] = (1, 2, 4, 8, 16, 32)
    """Allowed batch sizes, each one warmed before ready; the last is max_rows. Given only one of the two, the other
    follows: powers of two up to max_rows, or the last of sizes."""
    max_tokens: Tokens | None = None
    """Rows times the length that they are padded to, where rows differ in length (texts): a batch of long ones has
    fewer rows. None: `max_rows` alone counts."""
    weight: Weight = 1.0
    """Share of the worker's time while several models have something to run: 2 gets twice as much as 1."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, given: Any) -> Any:  # noqa: ANN401 - whatever was given, still unchecked
        return derive_sizes(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _agree(self) -> "BatchingSettings":
        sizes = list(self.sizes)
        if sizes != sorted(set(sizes)) or not sizes:
            raise ValueError(f"batching.sizes {sizes} must be batch sizes that rise, at least one")
        if sizes[-1] != self.max_rows:
            raise ValueError(f"batching.sizes {sizes} must end with batching.max_rows ({self.max_rows})")
        return self


def derive_sizes(given: dict[str, Any]) -> dict[str, Any]:
    """Fill in `sizes` from `max_rows`, or `max_rows` from `sizes`, when only one is given and usable as it is.

    Nothing follows from a value that is refused: the mistake is told about the key that was written.
    """
    rows, sizes = given.get("max_rows"), given.get("sizes")
    if sizes is None:
        last = _usable(rows)
        if last is not None:
            return {**given, "sizes": [*(1 << n for n in range(last.bit_length()) if 1 << n < last), last]}
    elif rows is None and isinstance(sizes, list | tuple) and sizes:
        last = _usable(sizes[-1])
        if last is not None:
            return {**given, "max_rows": last}
    return given


def _usable(rows: Any) -> int | None:  # noqa: ANN401 - whatever was given, still unchecked
    try:
        return _ROWS.validate_python(rows)
    except ValidationError:
        return None


class WorkerSettings(Group):
    """The processes that own the devices and the models."""

    count: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | None = None
    """How many workers `headrace serve` starts; default: one per CUDA device (of those in CUDA_VISIBLE_DEVICES, if that
    is set), one without any."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """`auto`: CUDA where there is any, else cpu. With `auto` and `cuda` worker number i takes device i."""
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """CPU threads of a forward pass; default: the worker's share of the cores."""
    precision: Literal["auto", "fp16", "fp32"] = "auto"
    """`auto`: FP16 autocast on CUDA, FP32 on a CPU."""
    compile: bool = False
    """torch.compile: longer start, faster forward where it works."""
    cuda_graphs: bool = True
    """CUDA graphs, one per allowed batch size: more device memory, far less work for the host per batch."""
    hang_limit_ms: Milliseconds = 10_000
    """A batch that takes longer than this and 3 × the slowest one so far loses its worker."""
    return_limit_ms: Milliseconds = 20_000
    """How long admitted requests wait for a lost worker to come back."""
    staged_batches: Annotated[int, Field(ge=1, le=4)] = 2
    """Batches outstanding per worker: one running, the rest staged."""
    memory_budget_bytes: Bytes | None = None
    """For the models of one worker, as measured. Default: a share of the device's memory."""


class SupervisorSettings(Group):
    """`headrace serve`: restarts and stopping."""

    backoff_first_ms: Milliseconds = 100
    backoff_max_ms: Milliseconds = 10_000
    stable_ms: Milliseconds = 10_000
    """A process that lived this long starts again without delay."""
    max_failures: Annotated[int, Field(ge=1)] = 10
    """Failures in a row after which `headrace serve` gives up with exit code 70; a worker is tried on for as long as
    another one serves."""
    stop_ms: Milliseconds = 7_000
    """After Ctrl-C or SIGTERM: what still lives then is killed. Longer than `gateway.drain_ms` by 3500 or more."""


class Settings(BaseSettings):
    """Everything. `headrace.yaml`, overridden by `HEADRACE_GROUP__NAME` environment variables."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_", env_nested_delimiter="__", frozen=True, extra="forbid", validate_default=True
    )

    repository: Folder = Path("models")
    """Folder of models, one folder each."""
    models: tuple[str, ...] = ()
    """Names to serve; empty: every model of the repository that has a version."""
    runtime_dir: Folder | None = None
    """Private folder (0700) where the processes meet; default: `headrace` in $XDG_RUNTIME_DIR, else in the
    temporary folder with the user's id."""
    log: LogSettings = LogSettings()
    gateway: GatewaySettings = GatewaySettings()
    admission: AdmissionSettings = AdmissionSettings()
    arena: ArenaSettings = ArenaSettings()
    pool: PoolSettings = PoolSettings()
    batching: BatchingSettings = BatchingSettings()
    worker: WorkerSettings = WorkerSettings()
    cache: CacheSettings = CacheSettings()
    guard: GuardSettings = GuardSettings()
    admin: AdminSettings = AdminSettings()
    supervisor: SupervisorSettings = SupervisorSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic-settings passes them by keyword
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the loader passes in: it reads file and environment itself, to tell where each value came from."""
        return (init_settings,)

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        _require_at_most(("batching.max_rows", self.batching.max_rows), self._each("admission.max_rows"))
        _require_at_most(
            ("admission.max_inputs_per_request", self.admission.max_inputs_per_request),
            self._each("admission.max_rows"),
        )
        for held in ("admission.max_bytes", "arena.budget_bytes"):
            _require_at_most(("gateway.max_message_bytes", self.gateway.max_message_bytes), self._each(held))
        _require_at_most(("1", 1), self._each("admission.max_requests"))
        if self.gateway.processes > 1 and self.gateway.system_shared_memory_prefix:
            raise ValueError(
                "gateway.system_shared_memory_prefix needs gateway.processes: 1 (each knows its own regions)"
            )
        _require_at_most(
            ("gateway.default_deadline_ms", self.gateway.default_deadline_ms),
            ("gateway.max_deadline_ms", self.gateway.max_deadline_ms),
        )
        _require_at_most(
            ("gateway.drain_ms", self.gateway.drain_ms),
            (f"supervisor.stop_ms less {STOP_REST_MS} for the rest of a stop", self.supervisor.stop_ms - STOP_REST_MS),
        )
        _require_at_most(
            ("supervisor.backoff_first_ms", self.supervisor.backoff_first_ms),
            ("supervisor.backoff_max_ms", self.supervisor.backoff_max_ms),
        )
        if self.gateway.grpc_address == self.gateway.http_address and not self.gateway.grpc_address.endswith(":0"):
            raise ValueError("gateway.grpc_address and gateway.http_address are the same")
        return self

    def _each(self, name: str) -> tuple[str, int]:
        """What one gateway has of a limit, and how a refusal calls it."""
        group, _, key = name.partition(".")
        count, total = self.gateway.processes, getattr(getattr(self, group), key)
        return (name if count == 1 else f"{name} / gateway.processes {total} / {count}", total // count)


def _require_at_most(small: tuple[str, int], large: tuple[str, int]) -> None:
    if small[1] > large[1]:
        raise ValueError(f"{small[0]} ({small[1]}) must not be above {large[0]} ({large[1]})")
