from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.messages import PROTOCOL_VERSION, FromWorker, ToWorker, Welcome
from shared.transport import Dealer
from tests.support.worker_parts import TwoSidedArena
from workers import loop
from workers.backends.base import Device, DeviceLost
from workers.loop import Worker

STICKY = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


class DeadDevice(Device):
    """After a sticky error every call raises, the one that lets go of the arena too."""

    name = "cuda:0"

    def attach(self, memory: memoryview) -> None:
        pass

    def detach(self) -> None:
        raise RuntimeError(STICKY)


class CountingDealer(Dealer[ToWorker, FromWorker]):
    closed = 0

    def close(self) -> None:
        CountingDealer.closed += 1
        super().close()


class NoStop:
    requested = False


@pytest.fixture
def arena() -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena()
    yield arena
    arena.close()


def serve_with(session_raises: Exception | None, arena: TwoSidedArena, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """One gateway's life on a device that is dead when it ends."""

    class Session:
        def __init__(self, *_: object) -> None:
            pass

        def serve(self, *_: object) -> None:
            if session_raises is not None:
                raise session_raises

    CountingDealer.closed = 0
    patch.setattr(loop, "Session", Session)
    patch.setattr(loop, "Dealer", CountingDealer)
    endpoint = f"ipc://{folder}/workers"
    greeting = SimpleNamespace(
        arena_fd=arena.owner.fd, welcome=Welcome(PROTOCOL_VERSION, 1, endpoint, b"worker-0.1", arena.owner.nbytes)
    )
    worker = Worker("worker-0", folder / "gateway.sock", DeadDevice(), None, NoStop())  # type: ignore[arg-type]  # fakes
    worker._serve(greeting)  # type: ignore[arg-type]  # a fake


def test_a_lost_device_stays_the_reason_when_it_can_not_be_detached_either(
    arena: TwoSidedArena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeviceLost, match="in the forward pass"):
        serve_with(DeviceLost("cuda:0: assert in the forward pass"), arena, tmp_path, monkeypatch)
    assert CountingDealer.closed == 1


@pytest.mark.parametrize("raised", [None, KeyError("a bug of ours")])
def test_a_device_that_can_not_be_detached_is_lost(
    arena: TwoSidedArena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception | None
) -> None:
    with pytest.raises(DeviceLost) as caught:
        serve_with(raised, arena, tmp_path, monkeypatch)
    assert str(caught.value) == "cuda:0: CUDA error: device-side assert triggered"
    assert CountingDealer.closed == 1
