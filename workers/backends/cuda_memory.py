"""The memory of one CUDA device. Worker only."""

import torch

from workers.backends.device_memory import HostMemory


class CudaMemory(HostMemory):
    """Counted as torch reserves it: what a freed tensor leaves stays reserved until it is given back."""

    share = 0.9

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        """See DeviceMemory."""
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def used_bytes(self) -> int:
        """See DeviceMemory."""
        return int(torch.cuda.memory_reserved(self._device))

    def give_back(self) -> None:
        """The host's too: weights have come through it."""
        super().give_back()
        torch.cuda.empty_cache()
