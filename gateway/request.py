"""A request and its answer inside the gateway: what the edge hands to `gateway/flow.py` and gets back."""

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from shared.errors import HeadraceError
from shared.pipeline import RawInput
from shared.results import Result, TextEnd, Token

GENERATION = "text_generation"
"""The task of models that generate."""
DEFAULT_PRIORITY = 100
"""Of a request that names none: after 1..99, before larger numbers."""


PROOF_PRIORITY = 0
"""Of readiness's own batches: nobody else can name it, so they share a batch with no request and are told apart."""
SHADOW_PRIORITY = 1 << 63
"""Of copies for a shadow: they run when nothing else waits. Nobody else can name it either."""


def is_own(priority: int) -> bool:
    """Whether work is the server's own, and no caller's: it is in no statistics."""
    return priority in {PROOF_PRIORITY, SHADOW_PRIORITY}


def late_s(arrived_s: float, deadline_s: float) -> float:
    """From when on a caller that leaves does so because its time is over, and not by choice (absolute, monotonic).

    The caller's clock runs ahead of ours by the way to here, and gRPC rounds a time limit up when it sends it; it
    cancels the call when the time is over, so both look the same.
    """
    return arrived_s + (deadline_s - arrived_s) * 0.98 - 0.01


class StageTimes(msgspec.Struct):
    """Seconds that one request spent in each stage; of a request with many inputs, its slowest input.

    Filled on the way, also when the request fails; the edge sends it as `server-timing` trailing metadata.
    """

    admit_s: float = 0.0
    wait_s: float = 0.0
    """For a slot and a free pool process."""
    prepare_s: float = 0.0
    batch_s: float = 0.0
    """In the batcher and staged at the worker."""
    copy_s: float = 0.0
    run_s: float = 0.0
    finish_s: float = 0.0
    batch_rows: int = 0
    nonfinite_rows: int = 0
    """Rows of raw tensors that hold NaN or infinity; named in the header only when there are any."""
    ended_workers: int = 0
    """Items that ended a worker twice, the second time alone."""
    version: str = ""
    reused: Literal["", "kept", "shared"] = ""
    """`kept`: answered from the cache; `shared`: by what another request had computed at the same time."""
    first_s: float = 0.0
    """Of generated text: until the first of it came, counted from admission; 0 before that."""
    tokens: int = 0
    """Generated."""

    def slowest_of(self, items: list["StageTimes"]) -> None:
        """Take over the stages of the item that spent the most time in all."""
        slowest = max(items, key=lambda item: item.wait_s + item.prepare_s + item.batch_s + item.run_s + item.finish_s)
        self.wait_s, self.prepare_s, self.batch_s = slowest.wait_s, slowest.prepare_s, slowest.batch_s
        self.copy_s, self.run_s, self.finish_s = slowest.copy_s, slowest.run_s, slowest.finish_s
        self.batch_rows = slowest.batch_rows
        self.nonfinite_rows = sum(item.nonfinite_rows for item in items)
        self.ended_workers = sum(item.ended_workers for item in items)
        self.first_s = max(item.first_s for item in items)
        self.tokens = sum(item.tokens for item in items)

    def server_timing(self) -> str:
        """In the form of HTTP's Server-Timing header (W3C); durations in milliseconds."""
        flag = f', cache;desc="{self.reused}"' if self.reused else ""
        flag += f', nonfinite;desc="{self.nonfinite_rows}"' if self.nonfinite_rows else ""
        if self.first_s:
            flag += f', first;dur={(self.admit_s + self.first_s) * 1e3:.3f}, tokens;desc="{self.tokens}"'
        return (
            f"admit;dur={self.admit_s * 1e3:.3f}, wait;dur={self.wait_s * 1e3:.3f}, "
            f"prepare;dur={self.prepare_s * 1e3:.3f}, batch;dur={self.batch_s * 1e3:.3f}, "
            f"copy;dur={self.copy_s * 1e3:.3f}, run;dur={self.run_s * 1e3:.3f}, "
            f'finish;dur={self.finish_s * 1e3:.3f}, rows;desc="{self.batch_rows}", version;desc="{self.version}"{flag}'
        )


class Part(NamedTuple):
    """What a text has grown by."""

    model: str
    version: str
    text: str
    tokens: list[Token]
    """Only where log probabilities were asked for."""
    end: TextEnd | None
    """In the last part."""


Write: TypeAlias = Callable[[Part], Awaitable[None]]
"""Takes a part of a text; while it does, the next one grows."""


class Request(msgspec.Struct):
    """One admitted-or-not request, free of protobuf and gRPC."""

    model: str
    """Empty: the only served model that fits."""
    version: str
    """Empty: the current one."""
    request_id: str
    """Never empty: the edge makes one when the caller sent none."""
    inputs: list[RawInput]
    options: dict[str, Any]
    deadline_s: float
    """Absolute, monotonic."""
    arrived_s: float
    nbytes: int
    """Payload bytes of all inputs."""
    partial_results: bool = False
    routing_key: str = ""
    """Requests with the same one go to the same version while a canary has a share; empty: by request id."""
    reuse: bool = True
    """False: computed anew, whatever the caches hold."""
    priority: int = DEFAULT_PRIORITY
    """Smaller goes first wherever work waits; it does not interrupt what runs."""
    unreadable: dict[int, HeadraceError] = {}
    """Inputs that the edge could not read, by index (`inputs` has an empty one there); only under `partial_results`."""
    times: StageTimes = msgspec.field(default_factory=StageTimes)
    task: str = ""
    """Where no model is named: those of this pipeline are meant, if there are any."""
    write: Write | None = None
    """Of a text that is wanted while it grows: takes its parts, the whole of it before the answer is there."""

    @property
    def late_s(self) -> float:
        """See `late_s`."""
        return late_s(self.arrived_s, self.deadline_s)


class Answer(msgspec.Struct):
    """What the flow returns. `results` has one entry per input, in order; errors only under `partial_results`."""

    model: str
    version: str
    results: list[Result | HeadraceError]
