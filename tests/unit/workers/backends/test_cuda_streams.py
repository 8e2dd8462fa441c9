"""The calls that the CUDA implementation makes, with CUDA itself replaced; what they do is for tests/gpu."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from workers.backends.base import DeviceLost, OutOfMemory
from workers.backends.cuda_streams import CudaStreams
from workers.backends.torch_device import CudaDevice


class Cuda:
    """Notes what is called, and on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.made = 0
        self.current = "default"
        self.sticky = False
        self.lock: Any = None
        cuda = self

        class Stream:
            def __init__(self, device: object) -> None:
                self.name = ("copying", "computing", "capturing")[cuda.made]
                cuda.made += 1

            def wait_event(self, event: object) -> None:
                cuda.note(f"wait on {self.name}")

        class Event:
            def __init__(self, **options: bool) -> None:
                assert options == {"enable_timing": True, "blocking": True}

            def record(self) -> None:
                cuda.note("record")

        for name, value in {
            "Stream": Stream, "Event": Event, "stream": self.stream, "graph": self.graph, "CUDAGraph": object,
            "synchronize": self.synchronize, "set_device": lambda _: None, "empty_cache": lambda: self.note("empty"),
            "graph_pool_handle": object,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def note(self, what: str) -> None:
        self.calls.append(f"{what} [{self.current}]")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:  # noqa: ANN401 - the fake above
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, pool: object, stream: Any, capture_error_mode: str) -> Iterator[None]:  # noqa: ANN401 - as above
        assert capture_error_mode == "thread_local"
        assert self.lock.locked(), "nobody may wait for the whole device now"
        self.note("begin")
        yield
        self.note("end")

    def synchronize(self, device: object) -> None:
        assert self.lock is None or self.lock.locked()
        self.note("synchronize")
        if self.sticky:
            raise RuntimeError("CUDA error: device-side assert triggered\nmore")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_computing_waits_on_the_device_for_the_copies_before_it(cuda: Cuda) -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    with streams.copying():
        copied = streams.mark()
    with streams.computing(copied):
        streams.mark()
    assert cuda.calls == ["record [copying]", "wait on computing [computing]", "record [computing]"]


def test_a_graph_is_captured_on_a_stream_of_its_own_and_nobody_waits_for_the_device_meanwhile(cuda: Cuda) -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    cuda.lock = streams.no_capture()

    def function(inputs: object) -> tuple[torch.Tensor, ...]:
        cuda.note("function")
        return ()

    streams.capture(function, [], streams.pool())
    streams.settle()
    assert cuda.calls == [
        "function [capturing]",
        "begin [capturing]",
        "function [capturing]",
        "end [capturing]",
        "synchronize [default]",
    ]
    assert not cuda.lock.locked()


def test_a_capture_that_fails_lets_go_of_lock_and_stream(cuda: Cuda) -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    cuda.lock = streams.no_capture()
    times = iter([(), RuntimeError("operation not permitted")])

    def function(inputs: object) -> tuple[torch.Tensor, ...]:
        outcome = next(times)
        if isinstance(outcome, RuntimeError):
            raise outcome
        return ()

    with pytest.raises(RuntimeError, match="not permitted"):
        streams.capture(function, [], None)
    assert cuda.current == "default"
    assert not cuda.lock.locked()


def test_a_pools_bytes_are_those_of_its_own_segments(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [((0, 0), 5000), ((0, 7), 2000), ((0, 8), 300), ((0, 7), 40)]
    found = [{"segment_pool_id": pool, "total_size": size} for pool, size in segments]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: found)
    assert CudaStreams(torch.device("cuda", 0)).pool_bytes((0, 7)) == 2040


def test_what_torch_takes_for_batches_is_not_taken_without_it(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    total, free, reserved = 10_000, 6000, 1000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    assert device.taken_without_torch() == 3000
    free, reserved = 4000, 3000  # a batch of a torch model
    assert device.taken_without_torch() == 3000
    free = 3500  # a session of another library
    assert device.taken_without_torch() == 3500


def test_an_error_is_judged_by_asking_the_device(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(torch.device("cuda", 0))
    cuda.lock = device.streams.no_capture()
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    mine = ValueError("mine")
    assert device.judge(mine) is mine
    assert "empty [default]" not in cuda.calls, "freeing the cache would slow the next batches down"
    assert isinstance(device.judge(torch.OutOfMemoryError("no memory")), OutOfMemory)
    assert "empty [default]" in cuda.calls
    cuda.sticky = True
    lost = device.judge(mine)
    assert isinstance(lost, DeviceLost)
    assert str(lost) == "cuda:0: CUDA error: device-side assert triggered"
