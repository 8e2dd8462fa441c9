"""The device that torch computes on: finding it, its memory, and moving batches onto it. Worker only."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shared.clock import now_s
from shared.errors import ExitCode, StartupError
from shared.logs import get_logger
from shared.tensors import Array
from workers.backends.base import Device, DeviceLost, OutOfMemory
from workers.staging import HostStaging, Inputs, batch_shape

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


class CopyTimer:
    """How long rows took to arrive; made just before they are gathered."""

    def __init__(self) -> None:
        self._started_s = now_s()
        self._seconds = 0.0

    def copied(self) -> None:
        """All copies have been made, or queued."""
        self._seconds = now_s() - self._started_s

    def seconds(self) -> float:
        """Only after the outputs have been waited for."""
        return self._seconds


class CudaCopyTimer(CopyTimer):
    """Asks the device: the host only queues the copies."""

    def __init__(self) -> None:
        super().__init__()
        self._before, self._after = _event(), _event()
        self._before.record()

    def copied(self) -> None:
        """See CopyTimer."""
        self._after.record()

    def seconds(self) -> float:
        """See CopyTimer."""
        return float(self._before.elapsed_time(self._after)) / 1e3


class TorchDevice(Device):
    """The CPU, and what is the same on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)
        self.is_cuda = device.type == "cuda"

    def attach(self, memory: memoryview) -> None:
        """Nothing to do on a CPU."""

    def detach(self) -> None:
        """Nothing to do on a CPU."""

    def memory_in_use(self) -> int:
        """Bytes that torch holds on the device; 0 on a CPU, where nobody counts."""
        return 0

    def staging(self) -> "CpuStaging | CudaStaging":
        """New batch buffers for one version."""
        return CpuStaging()

    def copy_timer(self) -> CopyTimer:
        """Running from now on."""
        return CopyTimer()

    def judge(self, error: Exception) -> Exception:
        """What an exception of a forward pass means: OutOfMemory, DeviceLost, or itself."""
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
            return OutOfMemory(str(error)[:300])
        return error


class CudaDevice(TorchDevice):
    """One NVIDIA GPU. All calls come from the worker's loop, except `memory_in_use` and `staging` while loading."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.enter_thread()
        torch.backends.cudnn.benchmark = True  # batch sizes are few and warmed up: worth measuring the best algorithm
        self._registered: int | None = None

    def attach(self, memory: memoryview) -> None:
        """Register the arena as pinned, so that rows go from there to the device without a copy on the host.

        A driver that refuses costs speed, not answers: the rows then go through a pinned buffer.
        """
        address = np.frombuffer(memory, np.uint8).ctypes.data
        code = int(_cudart().cudaHostRegister(address, memory.nbytes, 0))
        if code == 0:
            self._registered = address
        else:
            _log.warning("the arena is not pinned", cuda_error=code, effect="one more copy per row on the host")

    def detach(self) -> None:
        """Wait for the device, then unregister: afterwards the memory may be unmapped. Idempotent."""
        if self._registered is not None:
            address, self._registered = self._registered, None
            torch.cuda.synchronize(self.device)
            _cudart().cudaHostUnregister(address)

    def memory_in_use(self) -> int:
        """Bytes in tensors on this device."""
        return int(torch.cuda.memory_allocated(self.device))

    def staging(self) -> "CudaStaging":
        """New batch buffers for one version."""
        return CudaStaging(self)

    def copy_timer(self) -> CudaCopyTimer:
        """Running from now on."""
        return CudaCopyTimer()

    def enter_thread(self) -> None:
        """The current device is a property of the thread."""
        torch.cuda.set_device(self.device)

    @property
    def arena_is_pinned(self) -> bool:
        """Whether rows may be copied from the arena without waiting."""
        return self._registered is not None

    def judge(self, error: Exception) -> Exception:
        """Ask the device itself: after a sticky error every call on it fails, this one too."""
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            return OutOfMemory(str(error)[:300])
        try:
            torch.cuda.synchronize(self.device)
            torch.zeros(1, device=self.device).item()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return error
        except RuntimeError as sticky:
            return DeviceLost(f"{self.name}: {str(sticky).splitlines()[0][:300]}")
        return super().judge(error)


class CpuStaging:
    """Rows gathered in reused host memory; tensors of it without a copy."""

    def __init__(self) -> None:
        self._host = HostStaging()

    def gather(self, items: Inputs, padded_rows: int) -> list[torch.Tensor]:  # noqa: ARG002 - a CPU runs what there is
        """One tensor `[rows, …]` per input, on the CPU, valid until the next call."""
        return [torch.from_numpy(batch) for batch in self._host.gather(items)]


class CudaStaging:
    """Device buffers, reused. Rows in the pinned arena are copied straight from there, others through a pinned buffer.

    The copies are queued on the current stream and not waited for: the slots stay the worker's until it has answered,
    and a pass ends by waiting for its outputs, so no buffer is overwritten while it is read.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._on_device: list[torch.Tensor] = []
        self._pinned: list[torch.Tensor] = []

    def gather(self, items: Inputs, padded_rows: int) -> list[torch.Tensor]:
        """One tensor `[padded_rows, …]` per input on the device; what stands in the padding is of no meaning."""
        columns = enumerate(zip(*items, strict=True))
        return [self._gather(number, arrays, padded_rows) for number, arrays in columns]

    def _gather(self, number: int, arrays: Sequence[Array], padded_rows: int) -> torch.Tensor:
        rows, *rest = batch_shape(arrays)
        shape = (max(rows, padded_rows), *rest)
        kind = torch.from_numpy(np.empty(0, arrays[0].dtype)).dtype
        nbytes = math.prod(shape) * arrays[0].itemsize
        batch = _grown(self._on_device, number, nbytes, self._device.device).view(kind).view(shape)
        even = all(array.shape[1:] == tuple(rest) for array in arrays)
        if not even or rows < len(batch):
            # Zeros where an item is smaller than the largest, and in the padding rather than an old batch's rows.
            batch.zero_()
        row = 0
        for array in arrays:
            target = batch[row : row + len(array)]
            if not even:
                target = target[(slice(None), *(slice(size) for size in array.shape[1:]))]
            self._copy(number, array, target, even=even)
            row += len(array)
        return batch

    def _copy(self, number: int, array: Array, target: torch.Tensor, *, even: bool) -> None:
        # Inline rows are read-only bytes of the message; what is writable lies in the arena.
        if even and array.flags.writeable and self._device.arena_is_pinned:
            target.copy_(torch.from_numpy(array), non_blocking=True)
            return
        pinned = _grown(self._pinned, number, array.nbytes, None).view(target.dtype).view(array.shape)
        np.copyto(pinned.numpy(), array)
        target.copy_(pinned)  # waits: the buffer is used again by the next item


def _cudart() -> Any:  # noqa: ANN401 - a module made by torch's C++ side, without types
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch annotates it not


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch annotates it not


def _grown(buffers: list[torch.Tensor], number: int, nbytes: int, device: torch.device | None) -> torch.Tensor:
    """Buffer `number`, at least `nbytes` large, cut to it; `device` None means pinned host memory."""
    while len(buffers) <= number:
        buffers.append(torch.empty(0, dtype=torch.uint8))
    if buffers[number].nbytes < nbytes:
        if device is None:
            buffers[number] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            buffers[number] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return buffers[number][:nbytes]
