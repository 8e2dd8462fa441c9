"""The device that torch computes on: finding it, its memory, and what its errors mean. Worker only."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shared.errors import ExitCode, StartupError
from shared.logs import get_logger
from shared.tensors import Array
from workers.backends.base import Device, DeviceLost, OutOfMemory
from workers.backends.cuda_memory import CudaMemory
from workers.backends.cuda_streams import CudaStreams
from workers.backends.streams import Streams

_log = get_logger()


def find(setting: str, index: int, threads: int) -> "TorchDevice":
    """The device that `worker.device` means for worker number `index`; `threads` per forward pass on the CPU.

    Raises StartupError(MODEL_LOAD) when there is no such device.
    """
    torch.set_num_threads(threads)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "auto":
        if count == 0:
            return TorchDevice(torch.device("cpu"))
        wanted = index
    elif setting == "cpu":
        return TorchDevice(torch.device("cpu"))
    else:
        wanted = int(setting.partition(":")[2] or index)
    if wanted >= count:
        raise StartupError(
            ExitCode.MODEL_LOAD,
            f"worker.device is {setting}, which means cuda:{wanted} for worker {index}; "
            f"torch sees {count} CUDA device(s) on this machine (worker.count sets how many workers are started)",
        )
    return CudaDevice(torch.device("cuda", wanted))


class TorchDevice(Device):
    """The CPU, and what is the same on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)
        self.is_cuda = device.type == "cuda"
        self.runs_aside = not self.is_cuda  # one stream, and a proof takes it for milliseconds only
        self.streams: Streams | None = None
        """Where it works beside the host."""

    def attach(self, memory: memoryview) -> None:
        """Nothing to do on a CPU."""

    def detach(self, memory: memoryview | None = None) -> None:
        """Nothing to do on a CPU."""

    def taken_without_torch(self) -> int:
        """Bytes of the device that others hold than torch in this process; 0 on a CPU, where nobody counts."""
        return 0

    def is_pinned(self, array: Array) -> bool:  # noqa: ARG002 - a CPU copies nothing
        """Whether the device copies this array by itself."""
        return False

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
        """Turns what is raised inside into OutOfMemory or DeviceLost where it means that."""
        try:
            yield
        except (OutOfMemory, DeviceLost):
            raise
        except Exception as error:
            meaning = self.judge(error)
            if meaning is error:
                raise
            raise meaning from error

    def judge(self, error: Exception) -> Exception:
        """What an exception of a forward pass means: OutOfMemory, DeviceLost, or itself."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
            return OutOfMemory(str(error)[:300])
        return error


class CudaDevice(TorchDevice):
    """One NVIDIA GPU. All calls come from the worker's loop, except those that a load makes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.enter_thread()
        torch.backends.cudnn.benchmark = True  # batch sizes are few and warmed up: worth measuring the best algorithm
        self.streams: CudaStreams = CudaStreams(device)
        self.memory = CudaMemory(device)
        self._registered: dict[int, int] = {}
        """Arenas that the device copies from by itself: address → bytes."""

    def attach(self, memory: memoryview) -> None:
        """Register the arena as pinned, so that rows go from there to the device without a copy on the host.

        A driver that refuses costs speed, not answers: the rows then go through a pinned buffer.
        """
        address = _address(memory)
        code = int(_cudart().cudaHostRegister(address, memory.nbytes, 0))
        if code == 0:
            self._registered[address] = memory.nbytes
        else:
            _log.warning("the arena is not pinned", cuda_error=code, effect="one more copy per row on the host")

    def detach(self, memory: memoryview | None = None) -> None:
        """Wait for the device, then unregister: afterwards the memory may be unmapped. Idempotent."""
        for address in list(self._registered) if memory is None else [_address(memory)]:
            if self._registered.pop(address, None) is not None:
                self.streams.settle()
                _cudart().cudaHostUnregister(address)

    def fileno(self) -> int:
        """See Device."""
        return self.streams.fileno()

    def quiet(self) -> None:
        """See Device."""
        self.streams.quiet()

    def taken_without_torch(self) -> int:
        """What the driver says, less what torch has of it: batches of torch models come and go meanwhile."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total) - int(free) - int(torch.cuda.memory_reserved(self.device))

    def enter_thread(self) -> None:
        """The current device is a property of the thread."""
        torch.cuda.set_device(self.device)

    def is_pinned(self, array: Array) -> bool:
        """Whether an array lies in a registered arena."""
        if not array.flags.writeable:  # rows inside a message
            return False
        first = array.ctypes.data
        return any(start <= first and first + array.nbytes <= start + size for start, size in self._registered.items())

    def judge(self, error: Exception) -> Exception:
        """Ask the device itself: after a sticky error every call on it fails, this one too."""
        try:
            self.streams.settle()  # also for what the failed pass has queued: its buffers are free then
            with self.streams.no_capture():
                if isinstance(error, torch.OutOfMemoryError):
                    torch.cuda.empty_cache()
                torch.zeros(1, device=self.device).item()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        except RuntimeError as sticky:
            return DeviceLost(f"{self.name}: {str(sticky).splitlines()[0][:300]}")
        return super().judge(error)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _cudart() -> Any:  # noqa: ANN401 - a module made by torch's C++ side, without types
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch annotates it not
