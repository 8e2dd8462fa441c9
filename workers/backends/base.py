"""What a backend is to the rest of the worker. No torch here: a `simulated` worker never imports it.

A *runner* is one loaded version on its device. The engine gives it the rows of some items, and gets output arrays on
the host and, per row, whether the numbers are finite.
"""

import abc
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shared.errors import ExitCode, StartupError
from shared.tensors import Array
from workers.backends.device_memory import DeviceMemory, HostMemory
from workers.staging import Inputs

Precision = Literal["fp16", "fp32"]
Mask = npt.NDArray[np.bool_]
Stages = Callable[[str], contextlib.AbstractContextManager[None]]
"""Times the stages of a load: `with stages("read"):`, then "build", then "device"."""


def untimed(_stage: str) -> contextlib.AbstractContextManager[None]:
    """For loads whose stages nobody wants to know."""
    return contextlib.nullcontext()


class DeviceLost(Exception):
    """The device answers no more (a sticky CUDA error): this process must end, no call on the device can succeed."""


class OutOfMemory(Exception):
    """The device has no memory for a batch of this size; smaller ones may run."""


class LoadFailed(StartupError):
    """A version can't be loaded; one sentence that names the model and what is wrong."""

    def __init__(self, text: str, detail: str = "") -> None:
        super().__init__(ExitCode.MODEL_LOAD, text, detail)


class NotAsDeclared(Exception):
    """A network's outputs are not what its pipeline declares; the sentence is ours, and safe to show."""


class Forward(NamedTuple):
    """One forward pass, back on the host."""

    outputs: list[Array]
    """One per output spec, first dimension rows. May be overwritten by the next pass: copy before that."""
    finite: Mask
    """Per row: no NaN or infinity came out."""
    copy_s: float
    """Rows gathered and moved to the device."""
    run_s: float
    """Normalise, network, head, and outputs back on the host."""


class Pass(abc.ABC):
    """One forward pass under way. A batch holds it, and with it a lane, until its answers have been read."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether `wait` returns at once, or does all the work itself since nothing happens without it."""

    @abc.abstractmethod
    def wait(self) -> Forward:
        """Its result; may be asked again. Raises OutOfMemory, DeviceLost, or whatever the network raises."""


class _OnTheHost(Pass):
    """A pass that the host computes: only when it is asked for its result."""

    def __init__(self, runner: "Runner", items: Inputs, padded_rows: int, precision: Precision) -> None:
        self._run = partial(runner.run, items, padded_rows, precision)
        self._forward: Forward | None = None

    def done(self) -> bool:
        return True

    def wait(self) -> Forward:
        if self._forward is None:
            self._forward = self._run()
        return self._forward


class Runner(abc.ABC):
    """One loaded version. All calls but the constructor's and `prepare` come from the worker's loop.

    Before it is handed to the loop, the loader uses it alone.
    """

    precision: Precision
    memory_bytes: int
    """What its network takes of the device, measured when it was loaded."""
    pads: bool
    """Whether a batch is padded up to an allowed size: where the device runs each size from a prepared plan."""
    lanes = 1
    """Passes that may be under way at once: 2 where the rows of one are copied while another one is computed."""

    def prepare(self, rows: Sequence[Array], sizes: Sequence[int]) -> Sequence[int]:  # noqa: ARG002 - most need nothing
        """Make a plan for each of these batch sizes, once, after all have run; `rows` is an example of the largest.

        Returns the sizes that run faster from now on. Raises DeviceLost.
        """
        return ()

    def weigh(self) -> None:  # noqa: B027 - most hold from the start what they will hold
        """Measure `memory_bytes` again: the first passes are over, and may have left packed weights or graphs."""

    def start(self, items: Inputs, padded_rows: int, precision: Precision, lane: int) -> Pass:  # noqa: ARG002 - see `lanes`
        """As `run`, without waiting where the device works beside the host; `lane` (below `lanes`) must be free.

        Raises what `run` raises; then nothing is under way.
        """
        return _OnTheHost(self, items, padded_rows, precision)

    @abc.abstractmethod
    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:
        """Run all rows of `items` as one batch; `padded_rows` is at least their number.

        Raises OutOfMemory, DeviceLost, or whatever the network raises.
        """


class Device(abc.ABC):
    """Where runners run."""

    name: str
    """What torch calls it, or plain words."""
    memory: DeviceMemory = HostMemory()
    """Where its models are."""
    runs_aside: bool = True
    """Whether two threads may run batches of two versions at the same time."""

    def enter_thread(self) -> None:  # noqa: B027 - most devices need nothing
        """Called by a thread that is about to load onto the device."""

    @abc.abstractmethod
    def attach(self, memory: memoryview) -> None:
        """A gateway's arena is about to be used; there may be several at a time."""

    @abc.abstractmethod
    def detach(self, memory: memoryview | None = None) -> None:
        """This arena (by default each one) is about to be unmapped. Idempotent.

        What it raises means that the device is lost.
        """

    def fileno(self) -> int | None:
        """Becomes readable when a pass that was started is done; None where `start` leaves nothing under way."""
        return None

    def quiet(self) -> None:  # noqa: B027 - most devices need nothing
        """Make `fileno` unreadable until the next pass is done."""


class NoDevice(Device):
    """For backends that compute nothing."""

    name = "simulated"

    def attach(self, memory: memoryview) -> None:
        """Nothing to do."""

    def detach(self, memory: memoryview | None = None) -> None:
        """Nothing to do."""
