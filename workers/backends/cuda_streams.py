"""The port `Streams` on CUDA. Worker only; needs a GPU to do anything, so `tests/gpu` is where it is tested."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor

from workers.backends.bell import Bell
from workers.backends.streams import Function, Graph, Mark, Streams


class CudaMark:
    """A CUDA event. The host sleeps while it waits: a spinning thread would take a core from gateway and pool."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]  # torch annotates it not
        self.event.record()

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()

    def reached(self) -> bool:
        """See Mark."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch annotates it not

    def after_s(self, earlier: Mark) -> float:
        """See Mark."""
        return float(cast("CudaMark", earlier).event.elapsed_time(self.event)) / 1e3


class CudaGraph:
    """A captured CUDA graph and the tensors that it fills."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        """See Graph."""
        self._graph.replay()


class CudaStreams(Streams):
    """One stream for copies, one for computing, and one on which graphs are captured.

    None of them is CUDA's default stream, which would wait for all others. Weights are placed on the default stream by
    the loader, so it settles the device before a version runs for the first time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = _stream(device)
        self._computing = _stream(device)
        self._capturing = _stream(device)
        self._bell = Bell()
        self._capture_lock = threading.Lock()

    def no_capture(self) -> AbstractContextManager[object]:
        """Inside, no other thread captures a graph: waiting for the whole device would end in an error meanwhile."""
        return self._capture_lock

    @property
    def computing_handle(self) -> int:
        """CUDA's own handle of the queue for computing, for libraries that are to use it, too."""
        return int(self._computing.cuda_stream)

    def buffer(self, nbytes: int) -> Tensor:
        """See Streams. The allocator hands memory out again in the order of the stream that it was asked on."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pinned(self, nbytes: int) -> Tensor:
        """See Streams."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copying(self) -> AbstractContextManager[None]:
        """See Streams."""
        return cast("AbstractContextManager[None]", torch.cuda.stream(self._copying))

    @contextlib.contextmanager
    def computing(self, after: Mark) -> Iterator[None]:
        """See Streams."""
        with torch.cuda.stream(self._computing):
            self._computing.wait_event(cast("CudaMark", after).event)
            yield

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See Streams."""
        target.copy_(source, non_blocking=True)

    def fill(self, target: Tensor, value: int) -> None:
        """See Streams."""
        target.fill_(value)

    def call(self, function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """See Streams."""
        return function(inputs)

    def mark(self) -> CudaMark:
        """See Streams."""
        return CudaMark()

    def pool(self) -> object:
        """See Streams."""
        return torch.cuda.graph_pool_handle()

    def capture(self, function: Function, inputs: Sequence[Tensor], pool: object) -> Graph:
        """See Streams. Other threads may go on using the device meanwhile, hence the error mode and the stream."""
        graph = torch.cuda.CUDAGraph()
        # The outer block also gives the thread its stream back where the end of a failed capture raises.
        with torch.cuda.stream(self._capturing):
            function(inputs)  # libraries make their handles and workspaces for a stream at the first call on it
            with (
                self._capture_lock,
                torch.cuda.graph(graph, pool=pool, stream=self._capturing, capture_error_mode="thread_local"),  # type: ignore[arg-type]  # an opaque handle
            ):
                outputs = function(inputs)
        return CudaGraph(graph, outputs)

    def settle(self) -> None:
        """See Streams."""
        with self._capture_lock:
            torch.cuda.synchronize(self._device)

    def pool_bytes(self, pool: object) -> int:
        """See Streams."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch annotates it not
        return sum(int(each["total_size"]) for each in segments if each["segment_pool_id"] == pool)

    def give_back(self) -> None:
        """See Streams."""
        torch.cuda.empty_cache()

    def ring_at(self, mark: Mark) -> None:
        """See Streams."""
        self._bell.ring_at(mark)

    def fileno(self) -> int:
        """See Streams."""
        return self._bell.fileno()

    def quiet(self) -> None:
        """See Streams."""
        self._bell.quiet()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch annotates it not
