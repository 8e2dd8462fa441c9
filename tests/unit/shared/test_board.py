from collections.abc import Iterator

import pytest

from shared.arena import Arena
from shared.board import IDLE, NOTHING, Board, Doing
from shared.settings import MAX_WORKERS


@pytest.fixture(params=[64, 1 << 16])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = Arena.create(request.param)
    yield arena
    arena.close()


def test_what_a_worker_writes_its_gateway_reads_and_nobody_elses_record(arena: Arena) -> None:
    gateway, worker = Board(arena.fd, arena.nbytes), Board(arena.fd, arena.nbytes)
    worker.write("worker-1", Doing(7, 12.5))
    last = f"worker-{MAX_WORKERS - 1}"
    worker.write(last, Doing(-1, 3.0))
    assert gateway.read("worker-1") == Doing(7, 12.5)
    assert gateway.read(last) == Doing(-1, 3.0)
    assert gateway.read("worker-0") == NOTHING == Doing(IDLE, 0.0)
    worker.close()
    assert gateway.read("worker-1") == Doing(7, 12.5), "also when the worker is gone"
    gateway.close()


def test_slots_and_board_do_not_touch(arena: Arena) -> None:
    board = Board(arena.fd, arena.nbytes)
    whole = arena.lease(arena.nbytes)
    assert whole is not None
    whole.view[:] = b"\xff" * arena.nbytes
    assert board.read("worker-0") == NOTHING
    board.write("worker-0", Doing(0, 0.0))
    assert set(whole.view) == {255}
    whole.close()
    board.close()


@pytest.mark.parametrize("name", ["worker", "worker-", "worker-x", "worker-256", "worker-²"])
def test_a_name_without_a_place_writes_nothing(arena: Arena, name: str) -> None:
    board = Board(arena.fd, arena.nbytes)
    board.write(name, Doing(1, 1.0))
    assert board.read(name) is None
    assert {board.read(f"worker-{index}") for index in range(MAX_WORKERS)} == {NOTHING}
    board.close()
