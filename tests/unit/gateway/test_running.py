from collections.abc import Iterator

import pytest

from gateway.batcher import Batch, QueuedItem, QueueKey
from gateway.cost_model import CostModel
from gateway.hangs import ASIDE, FOREIGN, SLOWER, Hangs
from gateway.pauses import Pauses
from gateway.running import Running, RunningBatches
from gateway.worker_client import Worker
from shared.arena import Arena
from shared.board import ELSEWHERE, IDLE, Board, Doing
from shared.clock import FOREVER_S
from shared.messages import PROTOCOL_VERSION, BatchDone, Hello

KEY, SLOW_KEY = QueueKey(1), QueueKey(2)
HELLO = Hello(PROTOCOL_VERSION, 1, "worker-0", "cpu")
LIMIT_S = 10.0


@pytest.fixture
def board() -> Iterator[Board]:
    arena = Arena.create(64)
    board = Board(arena.fd, arena.nbytes)
    yield board
    board.close()
    arena.close()


@pytest.fixture
def shared(board: Board) -> Worker:
    """A worker that other gateways use, too."""
    return Worker(b"worker-0.1", HELLO, 1, board, is_shared=True)


def batch(key: QueueKey = KEY) -> Batch:
    return Batch(key, [QueuedItem(1, key, 1, FOREVER_S, 0.0)], 1, 1)


def sent(
    running: RunningBatches,
    worker: Worker,
    *numbers: int,
    at_s: float = 0.0,
    key: QueueKey = KEY,
    aside: bool = False,
) -> None:
    for number in numbers:
        running.add(number, Running(batch(key), worker, at_s, 0.1, aside))


def done(number: int, started_s: float) -> BatchDone:
    return BatchDone(number, [], started_s, 0.0, 0.1, 1)


class Killed:
    """Stands in for the worker client."""

    def __init__(self, *workers: Worker) -> None:
        self._workers = workers
        self.names: list[str] = []

    def workers(self) -> tuple[Worker, ...]:
        return self._workers

    def kill(self, worker: Worker) -> None:
        self.names.append(worker.name)


def killed_at(
    now_s: float,
    running: RunningBatches,
    worker: Worker,
    cost: CostModel | None = None,
    pauses: Pauses | None = None,
) -> list[str]:
    killed = Killed(worker)
    worker.overran = False
    Hangs(killed, running, cost or CostModel(), LIMIT_S).kill(now_s, pauses or Pauses())  # type: ignore[arg-type]  # a fake
    return killed.names


def test_what_others_run_in_between_counts_into_starts_ends_and_forecasts(shared: Worker) -> None:
    running = RunningBatches()
    for number in range(1, 40):
        now_s = number * 1.0
        sent(running, shared, number, at_s=now_s)
        running.done(done(number, started_s=now_s + 0.3), now_s + 0.4)
    assert running.others_s() == pytest.approx(0.3, rel=0.01)
    assert running.starts_s(shared, 50.0) == pytest.approx(50.3, rel=0.01)
    sent(running, shared, 40, 41, at_s=50.0)
    assert running.ends_s(shared) == pytest.approx(50.0 + 2 * (0.1 + 0.3), rel=0.01)
    assert running.with_others(lambda rows: rows * 0.01)(8) == pytest.approx(0.08 + 0.3, rel=0.01)
    assert running.load(shared, 50.1) == (True, pytest.approx(50.8, rel=0.01)), "not late: the others are at work"


def test_what_others_take_is_unlearned_when_they_are_quiet(shared: Worker) -> None:
    running = RunningBatches()
    for number in range(1, 60):
        now_s = number * 1.0
        sent(running, shared, number, at_s=now_s)
        running.done(done(number, started_s=now_s + (0.3 if number < 20 else 0.0)), now_s + 0.4)
    assert running.others_s() < 0.001


def test_on_a_worker_of_its_own_nothing_is_added() -> None:
    own, running = Worker(b"worker-0.1", HELLO, 1), RunningBatches()
    sent(running, own, 1)
    running.done(done(1, started_s=5.0), 5.1)
    assert running.others_s() == 0.0
    assert running.starts_s(own, 7.0) == 7.0


def test_a_batch_behind_one_of_ours_waits_from_its_end_on(shared: Worker) -> None:
    running = RunningBatches()
    sent(running, shared, 1, 2)
    running.done(done(1, started_s=0.0), 1.0)
    running.done(done(2, started_s=1.0), 2.0)
    assert running.others_s() == 0.0, "what our own batches take is no wait for others"


@pytest.mark.parametrize(("doing", "ran"), [(2, True), (1, True), (IDLE, False), (ELSEWHERE, False), (99, False)])
def test_only_what_the_worker_ran_is_suspected_of_its_death(
    shared: Worker, board: Board, doing: int, ran: bool
) -> None:
    running = RunningBatches()
    sent(running, shared, 1, 2)
    board.write("worker-0", Doing(doing, 1.0))
    lost = running.lost(shared)
    assert bool(lost) == ran
    assert len(running) == 0


def test_without_a_record_the_first_one_sent_is_taken_to_have_run() -> None:
    running, worker = RunningBatches(), Worker(b"worker-0.1", HELLO, 1)
    sent(running, worker, 1, 2)
    assert len(running.lost(worker)) == 1


def test_a_batch_aside_keeps_its_worker_from_nothing_and_is_suspected_all_the_same(
    shared: Worker, board: Board
) -> None:
    running = RunningBatches()
    sent(running, shared, 1, aside=True)
    assert (running.count(shared), running.busy(shared), running.models()) == (0, None, {KEY.model})
    sent(running, shared, 2)
    assert running.count(shared) == 1
    assert killed_at(LIMIT_S - 0.1, running, shared) == []
    board.write("worker-0", Doing(IDLE, 1.0))
    assert [each.aside for each in running.lost(shared)] == [True]
    assert len(running) == 0


def test_of_proofs_aside_only_the_first_is_judged_and_not_by_how_long_it_waited() -> None:
    running, own = RunningBatches(), Worker(b"worker-0.1", HELLO, 1)
    sent(running, own, 1, 2, 3, 4, aside=True)
    for number in (1, 2, 3):
        now_s = number * (ASIDE * LIMIT_S - 0.1)
        assert killed_at(now_s, running, own) == []
        running.done(done(number, started_s=0.0), now_s)
    assert killed_at(now_s + ASIDE * LIMIT_S - 0.1, running, own) == []
    assert killed_at(now_s + ASIDE * LIMIT_S + 0.1, running, own) == ["worker-0"]


def test_a_proof_may_wait_for_those_of_other_gateways(shared: Worker) -> None:
    running = RunningBatches()
    sent(running, shared, 1, aside=True)
    assert killed_at(FOREIGN * ASIDE * LIMIT_S - 0.1, running, shared) == []
    assert killed_at(FOREIGN * ASIDE * LIMIT_S + 0.1, running, shared) == ["worker-0"]


def test_a_batch_whose_version_is_proven_aside_does_not_hang_meanwhile(shared: Worker, board: Board) -> None:
    running = RunningBatches()
    sent(running, shared, 1, aside=True)
    sent(running, shared, 2)
    board.write("worker-0", Doing(IDLE, 0.0))
    assert killed_at(3 * LIMIT_S, running, shared) == []
    running.done(done(1, started_s=0.0), 3 * LIMIT_S)
    assert killed_at(4 * LIMIT_S - 0.1, running, shared) == []
    assert killed_at(4 * LIMIT_S + 0.1, running, shared) == ["worker-0"], "now it could have begun"


def test_a_batch_behind_one_that_waits_for_a_proof_hangs_as_any_other(shared: Worker, board: Board) -> None:
    running = RunningBatches()
    sent(running, shared, 1, aside=True)
    sent(running, shared, 2)
    sent(running, shared, 3, key=SLOW_KEY)
    board.write("worker-0", Doing(3, 1.0))
    assert killed_at(LIMIT_S + 0.9, running, shared) == []
    assert killed_at(LIMIT_S + 1.1, running, shared) == ["worker-0"]


def test_the_answer_to_a_batch_aside_says_nothing_of_the_row(shared: Worker) -> None:
    running = RunningBatches()
    sent(running, shared, 1, aside=True)
    sent(running, shared, 2)
    before_s = running.ends_s(shared)
    assert running.done(done(1, started_s=5.0), 5.1) is not None
    assert running.ends_s(shared) == before_s
    assert running.others_s() == 0.0


def test_our_batch_hangs_from_when_it_began(shared: Worker, board: Board) -> None:
    running = RunningBatches()
    sent(running, shared, 1)
    board.write("worker-0", Doing(1, 100.0))
    assert killed_at(100.0 + LIMIT_S - 0.1, running, shared) == []
    assert killed_at(100.0 + LIMIT_S + 0.1, running, shared) == ["worker-0"]


def test_a_worker_that_runs_anothers_batch_is_left_to_the_other_gateway(shared: Worker, board: Board) -> None:
    running, cost = RunningBatches(), CostModel()
    cost.seed(SLOW_KEY, [(1, 8.0)])
    sent(running, shared, 1)
    board.write("worker-0", Doing(ELSEWHERE, 100.0))
    assert killed_at(100.0 + 1.9 * LIMIT_S, running, shared) == []
    assert killed_at(100.0 + FOREIGN * LIMIT_S + 0.1, running, shared) == ["worker-0"], "nobody else does it"
    assert killed_at(100.0 + FOREIGN * LIMIT_S + 0.1, running, shared, cost) == [], "it may be the slow model's"
    assert killed_at(100.0 + FOREIGN * SLOWER * 8.0 + 0.1, running, shared, cost) == ["worker-0"]
    assert killed_at(1e6, RunningBatches(), shared) == [], "we want nothing of it"


def test_long_waits_while_others_are_served_one_after_another_are_no_hang(shared: Worker, board: Board) -> None:
    running = RunningBatches()
    sent(running, shared, 1)
    for now_s in range(1, 60):
        board.write("worker-0", Doing(ELSEWHERE, float(now_s)))
        assert killed_at(now_s + 1.0, running, shared) == []


def test_a_worker_that_stands_still_between_batches_hangs(shared: Worker, board: Board) -> None:
    running = RunningBatches()
    sent(running, shared, 1, at_s=100.0)
    board.write("worker-0", Doing(IDLE, 50.0))
    assert killed_at(100.0 + LIMIT_S - 0.1, running, shared) == []
    assert killed_at(100.0 + LIMIT_S + 0.1, running, shared) == ["worker-0"]


@pytest.mark.parametrize("doing", [1, ELSEWHERE, None])
def test_a_gateway_that_was_stopped_itself_kills_nobody_for_that_time(
    shared: Worker, board: Board, doing: int | None
) -> None:
    """It was stopped from 101 s to 131 s; what the worker does began at 100 s."""
    worker = shared if doing is not None else Worker(b"worker-0.1", HELLO, 1)
    running, pauses = RunningBatches(), Pauses()
    sent(running, worker, 1, at_s=100.0)
    if doing is not None:
        board.write("worker-0", Doing(doing, 100.0))
    for now_s in (100.75, 101.0, 131.0):
        pauses.noticed(now_s)
    limit_s = LIMIT_S * (FOREIGN if doing == ELSEWHERE else 1)
    assert killed_at(131.0, running, worker) == ["worker-0"], "as it looks to who knows nothing of the pause"
    assert killed_at(130.0 + limit_s - 0.1, running, worker, pauses=pauses) == []
    assert killed_at(130.0 + limit_s + 0.1, running, worker, pauses=pauses) == ["worker-0"], "but a hang is still found"
