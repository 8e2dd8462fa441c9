from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shared.errors import Code
from shared.messages import (
    BatchDone,
    CancelItems,
    Failure,
    FromWorker,
    KeepModels,
    LoadModel,
    ModelFailed,
    ModelLoaded,
    ModelNote,
    RunBatch,
    ToWorker,
    UnloadModel,
    WorkerReady,
)
from shared.transport import FrameTooBig, PeerLost
from tests.support.worker_parts import OVERFLOW, FakeRunner, TwoSidedArena, batch, item, loaded
from workers.backends.base import Forward, Precision
from workers.model_pool import Key, LoadedVersion
from workers.precision import LIMIT_ROWS
from workers.session import Session
from workers.staging import Inputs

VERSION = "0" * 16


class Dealer:
    """Gives the scripted turns: each turn is what one drain finds. The gateway is gone when the script is over."""

    def __init__(self, *turns: Sequence[ToWorker]) -> None:
        self.turns = deque(deque(turn) for turn in turns)
        self.sent: list[Any] = []
        self.refuse: type[Exception] | None = None

    def send(self, message: FromWorker) -> None:
        if self.refuse is not None and isinstance(message, BatchDone):
            refuse, self.refuse = self.refuse, None
            raise refuse("no")
        self.sent.append(message)

    def receive(self, timeout_s: float | None, watch: Sequence[int] = ()) -> ToWorker | None:
        if self.turns and self.turns[0]:
            return self.turns[0].popleft()
        if self.turns:
            self.turns.popleft()
        return None


class Greeting:
    def __init__(self, dealer: Dealer) -> None:
        self._dealer = dealer

    def fileno(self) -> int:
        return 0

    def gateway_alive(self) -> bool:
        return bool(self._dealer.turns)


class Pool:
    """Loads at once what it has; says so at the next look."""

    def __init__(self, *outcomes: LoadedVersion | Failure) -> None:
        self.outcomes = {Key("toy", VERSION): outcome for outcome in outcomes}
        self.ready: dict[Key, LoadedVersion] = {}
        self.wanted: list[Key] = []
        self.dropped: list[Key] = []
        self.kept: set[Key] | None = None

    def fileno(self) -> int:
        return 0

    def get(self, key: Key) -> LoadedVersion | None:
        return self.ready.get(key)

    def want(self, key: Key) -> None:
        self.wanted.append(key)

    def finished(self) -> list[tuple[Key, LoadedVersion | Failure]]:
        keys, self.wanted = self.wanted, []
        told = [(key, self.outcomes[key]) for key in dict.fromkeys(keys)]
        self.ready.update({key: outcome for key, outcome in told if isinstance(outcome, LoadedVersion)})
        return told

    def keep(self, keys: set[Key]) -> None:
        self.kept = keys

    def drop(self, key: Key) -> None:
        self.dropped.append(key)
        self.ready.pop(key, None)


class NoStop:
    requested = False

    def fileno(self) -> int:
        return 0


@pytest.fixture
def arena() -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena()
    yield arena
    arena.close()


def serve(arena: TwoSidedArena, dealer: Dealer, pool: Pool | None = None, stop: "NoStop | None" = None) -> Session:
    session = Session(Greeting(dealer), dealer, arena.attached, pool or Pool(loaded(FakeRunner())), lambda: 0.0)  # type: ignore[arg-type]  # fakes
    session.serve(stop or NoStop())  # type: ignore[arg-type]  # a fake
    return session


LOAD = LoadModel(1, "toy", VERSION)


def codes(done: BatchDone) -> dict[int, str | None]:
    return {answer.item: None if answer.failure is None else answer.failure.code for answer in done.answers}


def test_ready_comes_first_then_the_model_then_the_batch(arena: TwoSidedArena) -> None:
    dealer = Dealer([LOAD], [batch(item(5, 1), number=9)], [])
    serve(arena, dealer)
    ready, model, done = dealer.sent
    assert ready == WorkerReady()
    assert model == ModelLoaded(1, [(size, 0.001) for size in (1, 2, 4, 8, 16, 32)], 123, "fp32", 0.0, pads=True)
    assert (done.batch, codes(done)) == (9, {5: None})


def test_a_loaded_version_is_confirmed_at_once(arena: TwoSidedArena) -> None:
    pool = Pool()
    pool.ready[Key("toy", VERSION)] = loaded(FakeRunner())
    dealer = Dealer([LoadModel(4, "toy", VERSION)], [])
    serve(arena, dealer, pool)
    assert [message.model for message in dealer.sent[1:]] == [4]
    assert pool.wanted == []


def test_a_version_that_fails_to_load_says_why(arena: TwoSidedArena) -> None:
    failure = Failure(Code.NOT_READY, "weights lack a")
    dealer = Dealer([LOAD], [batch(item(5, 1))], [])
    serve(arena, dealer, Pool(failure))
    assert dealer.sent[1] == ModelFailed(1, failure)
    assert codes(dealer.sent[2]) == {5: Code.NOT_READY}


def test_two_numbers_for_one_version_are_both_answered(arena: TwoSidedArena) -> None:
    dealer = Dealer([LOAD, LoadModel(2, "toy", VERSION)], [], [])
    serve(arena, dealer)
    assert [message.model for message in dealer.sent[1:]] == [1, 2]


def test_a_batch_for_an_unknown_model_is_answered(arena: TwoSidedArena) -> None:
    dealer = Dealer([batch(item(5, 1), item(6, 1), model=99)], [])
    serve(arena, dealer)
    assert codes(dealer.sent[1]) == {5: Code.NOT_READY, 6: Code.NOT_READY}


def test_a_cancellation_overtakes_batches_that_wait(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    messages: list[ToWorker] = [batch(item(1, 1), number=1), batch(item(2, 2), item(3, 3), number=2), CancelItems([2])]
    dealer = Dealer([LOAD], messages, [], [])
    serve(arena, dealer, Pool(loaded(runner)))
    assert [codes(done) for done in dealer.sent[2:]] == [{1: None}, {2: Code.CANCELLED, 3: None}]
    assert [rows for rows, _, _ in runner.passes] == [[1.0], [3.0]]


def test_cancellations_of_what_is_answered_are_not_remembered(arena: TwoSidedArena) -> None:
    dealer = Dealer([LOAD], [CancelItems(list(range(10_000)))], [batch(item(7, 1))], [])
    session = serve(arena, dealer)
    assert codes(dealer.sent[-1]) == {7: None}
    assert session._cancelled == set()


def test_unload_forgets_the_version_unless_another_number_means_it(arena: TwoSidedArena) -> None:
    pool = Pool(loaded(FakeRunner()))
    dealer = Dealer(
        [LOAD, LoadModel(2, "toy", VERSION)], [UnloadModel(1), UnloadModel(77)], [batch(item(1, 1), model=2)], []
    )
    serve(arena, dealer, pool)
    assert pool.dropped == []
    assert codes(dealer.sent[-1]) == {1: None}
    dealer = Dealer([LOAD], [UnloadModel(1)], [batch(item(1, 1))], [])
    serve(arena, dealer, pool)
    assert pool.dropped == [Key("toy", VERSION)]
    assert codes(dealer.sent[-1]) == {1: Code.NOT_READY}


def test_a_version_that_runs_differently_from_now_on_is_noted_once(arena: TwoSidedArena) -> None:
    runner = FakeRunner("fp16", memory_rows=2)
    overflows = [batch(*(item(number, OVERFLOW) for number in range(LIMIT_ROWS)))]
    dealer = Dealer([LOAD, LoadModel(2, "toy", VERSION)], overflows, [batch(item(1, OVERFLOW))], [])
    serve(arena, dealer, Pool(loaded(runner)))
    notes = [message for message in dealer.sent if isinstance(message, ModelNote)]
    assert notes == [ModelNote(1, "fp32", 2), ModelNote(2, "fp32", 2)]
    dealer = Dealer([LoadModel(9, "toy", VERSION)], [])
    pool = Pool()
    pool.ready[Key("toy", VERSION)] = version = loaded(runner)
    version.row_cap = 2
    serve(arena, dealer, pool)
    assert dealer.sent[1].row_cap == 2, "the next gateway learns it, too"


def test_versions_of_earlier_gateways_are_forgotten_before_new_ones_load(arena: TwoSidedArena) -> None:
    pool = Pool(loaded(FakeRunner()))
    serve(arena, Dealer([KeepModels([("toy", VERSION), ("other", "1" * 16)]), LOAD], []), pool)
    assert pool.kept == {Key("toy", VERSION), Key("other", "1" * 16)}


def test_a_signal_ends_the_session_before_the_next_batch(arena: TwoSidedArena) -> None:
    stop = NoStop()
    runner = FakeRunner()
    original = runner.run

    def run(items: Inputs, padded_rows: int, precision: Precision) -> Forward:
        stop.requested = True
        return original(items, padded_rows, precision)

    runner.run = run  # type: ignore[method-assign]  # the signal comes in the middle of a batch
    dealer = Dealer([LOAD], [batch(item(1, 1), number=1), batch(item(2, 1), number=2)], [], [])
    serve(arena, dealer, Pool(loaded(runner)), stop)
    assert [done.batch for done in dealer.sent if isinstance(done, BatchDone)] == [1]


def test_a_gateway_that_takes_no_answer_ends_the_session_not_the_process(arena: TwoSidedArena) -> None:
    dealer = Dealer([LOAD], [batch(item(1, 1))], [batch(item(2, 1))], [])
    dealer.refuse = PeerLost
    serve(arena, dealer)
    assert not [done for done in dealer.sent if isinstance(done, BatchDone)]


def test_an_answer_over_the_frame_limit_is_still_an_answer(arena: TwoSidedArena) -> None:
    dealer = Dealer([LOAD], [batch(item(1, 1))], [])
    dealer.refuse = FrameTooBig
    serve(arena, dealer)
    assert codes(dealer.sent[-1]) == {1: Code.INTERNAL}


def test_work_of_a_gateway_that_is_gone_is_not_run(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    messages: list[ToWorker] = [LOAD]
    script: list[RunBatch] = [batch(item(1, 1))]
    dealer = Dealer(messages, script)  # nothing after the batch: the stream ends while it is being read
    serve(arena, dealer, Pool(loaded(runner)))
    assert runner.passes == []
