"""What a device that works beside the host can do, in the few calls that the worker needs. Worker only.

Two queues: one for copies to the device, one for everything else. What is queued on one runs in that order; between
the two, and with the host, only marks give an order. `workers/backends/cuda_streams.py` is CUDA's; the tests' one
simulates time and runs what is queued only when its time has come.
"""

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from torch import Tensor

Function: TypeAlias = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""Tensors on the device → tensors on the device, without waiting for it."""


class Mark(Protocol):
    """A place in a queue."""

    def wait(self) -> None:
        """Let the host wait until the device has come here. Raises what the device raised on its way."""

    def reached(self) -> bool:
        """Whether it has. Raises as `wait` does."""

    def after_s(self, earlier: "Mark", /) -> float:
        """Seconds of the device's own time from `earlier` to here; both must have been reached."""


class Graph(Protocol):
    """A captured function: it reads the very inputs it was captured with, and writes `outputs`."""

    outputs: tuple[Tensor, ...]
    """On the device; overwritten by each replay, of this graph or another one of the same pool."""

    def replay(self) -> None:
        """Queue all of it at once."""


class Streams(abc.ABC):
    """The two queues of one device. Used by the worker's loop and, while it warms a version up, by the loader.

    Each `with` block is its thread's own. `copy`, `fill`, `call`, `mark` and a graph's `replay` go into the queue of
    the block that they stand in, and return at once.
    """

    @abc.abstractmethod
    def buffer(self, nbytes: int) -> Tensor:
        """New memory on the device, uint8; made and let go of inside `copying`."""

    @abc.abstractmethod
    def pinned(self, nbytes: int) -> Tensor:
        """New memory on the host from and to which the device copies by itself, uint8."""

    @abc.abstractmethod
    def copying(self) -> AbstractContextManager[None]:
        """What is queued inside goes to the queue for copies."""

    @abc.abstractmethod
    def computing(self, after: Mark) -> AbstractContextManager[None]:
        """What is queued inside goes to the queue for computing, and starts only when `after` has been reached."""

    @abc.abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; the host's side must be pinned, and stay untouched until a later mark has been reached."""

    @abc.abstractmethod
    def fill(self, target: Tensor, value: int) -> None:
        """Queue one value everywhere."""

    @abc.abstractmethod
    def call(self, function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Queue what the function does. Raises whatever it raises on the host, e.g. torch.OutOfMemoryError."""

    @abc.abstractmethod
    def mark(self) -> Mark:
        """A mark behind everything queued so far."""

    @abc.abstractmethod
    def pool(self) -> object:
        """New memory for the graphs of one version, which share it: they never run at the same time."""

    @abc.abstractmethod
    def capture(self, function: Function, inputs: Sequence[Tensor], pool: object) -> Graph:
        """Record what the function does. Raises whatever it raises, and RuntimeError where it waits for the device."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Let the host wait until nothing is queued any more. Raises what the device raised."""

    @abc.abstractmethod
    def pool_bytes(self, pool: object) -> int:
        """Device memory that a pool holds, whatever else runs on the device."""

    @abc.abstractmethod
    def give_back(self) -> None:
        """Return to the driver what no tensor and no pool needs."""

    @abc.abstractmethod
    def ring_at(self, mark: Mark) -> None:
        """Make `fileno` readable when the mark has been reached, or never will be."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """For the loop to wait on beside its sockets."""

    @abc.abstractmethod
    def quiet(self) -> None:
        """Make `fileno` unreadable until the next ring."""
