from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shared.board import ELSEWHERE, IDLE, Doing
from shared.errors import Code
from shared.generation_messages import CancelJobs, Generate, Generated, Piece
from shared.messages import (
    BatchDone,
    CancelItems,
    Failure,
    FromWorker,
    KeepModels,
    LoadModel,
    MemoryNote,
    ModelEvicted,
    ModelFailed,
    ModelLoaded,
    ModelNote,
    RunBatch,
    ToWorker,
    UnloadModel,
    WorkerReady,
)
from shared.model_config import revision_of
from shared.results import FinishReason, TextEnd, Token
from shared.transport import SEND_LIMIT_S, FrameTooBig
from tests.support.worker_parts import OVERFLOW, FakeRunner, TwoSidedArena, batch, item, loaded
from workers.aside import Aside
from workers.backends.base import NoDevice
from workers.flight import Flight
from workers.model_pool import Key, LoadedVersion, News
from workers.precision import LIMIT_ROWS
from workers.runs import Runs
from workers.session import Link, Session

VERSION = "0" * 16
KEY = Key("toy", VERSION, revision_of(b""))


class Dealer:
    """Gives the scripted turns: each turn is what one drain finds. The gateway is gone when the script is over."""

    def __init__(self, *turns: Sequence[ToWorker]) -> None:
        self.turns = deque(deque(turn) for turn in turns)
        self.sent: list[Any] = []
        self.too_big = 0
        self.takes = True

    def try_send(self, message: FromWorker) -> bool:
        if self.too_big and isinstance(message, BatchDone | Generated):
            self.too_big -= 1
            raise FrameTooBig("no")
        if self.takes:
            self.sent.append(message)
        return self.takes

    def receive(self, timeout_s: float | None, watch: Sequence[int] = ()) -> ToWorker | None:
        if self.turns and self.turns[0]:
            return self.turns[0].popleft()
        if self.turns:
            self.turns.popleft()
        return None


class Greeting:
    def __init__(self, dealer: Dealer) -> None:
        self._dealer = dealer

    def gateway_alive(self) -> bool:
        return bool(self._dealer.turns)


class Board:
    def __init__(self) -> None:
        self.shown: list[int] = []

    def write(self, worker: str, doing: Doing) -> None:
        assert worker == "worker-0"
        self.shown.append(doing.batch)


class Pool:
    """Loads at once what it has; says so at the next look."""

    def __init__(self, *outcomes: LoadedVersion | Failure) -> None:
        self.outcomes = dict.fromkeys([KEY], *outcomes) if outcomes else {}
        self.ready: dict[Key, LoadedVersion] = {}
        self.wanted: list[Key] = []
        self.dropped: list[Key] = []
        self.kept: set[Key] | None = None
        self.leaving: set[Key] = set()
        self.news = News()
        self.noted: MemoryNote | None = None

    def fileno(self) -> int:
        return 0

    def get(self, key: Key) -> LoadedVersion | None:
        return self.ready.get(key)

    def takes(self, key: Key) -> bool:
        return key in self.ready and key not in self.leaving

    def want(self, key: Key, config: bytes = b"") -> None:
        self.wanted.append(key)

    def turn(self) -> News:
        keys, self.wanted = self.wanted, []
        told = [(key, self.outcomes[key]) for key in dict.fromkeys(keys)]
        self.ready.update({key: outcome for key, outcome in told if isinstance(outcome, LoadedVersion)})
        news, self.news = self.news, News()
        news.finished += told
        return news

    def keep(self, keys: set[Key]) -> None:
        self.kept = keys

    def memory(self) -> MemoryNote | None:
        return self.noted

    def drop(self, key: Key) -> None:
        self.dropped.append(key)
        self.ready.pop(key, None)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def arena() -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena()
    yield arena
    arena.close()


class Bench:
    """Sessions with scripted gateways, and the worker's loop around them without its waits."""

    def __init__(self, arena: TwoSidedArena, pool: "Pool | None" = None) -> None:
        self.arena = arena
        self.pool = pool or Pool(loaded(FakeRunner()))
        self.clock = Clock()
        self.sessions: list[Session] = []
        self.runs = Runs(lambda: self.sessions, Flight(NoDevice()), Aside(NoDevice()), self.clock)

    def join(self, dealer: Dealer) -> Session:
        link: Any = Link("worker-0", Greeting(dealer), dealer, self.arena.attached, Board())  # type: ignore[arg-type]  # fakes
        session = Session(link, self.pool, self.clock)  # type: ignore[arg-type]  # a fake
        session.wanted_by_others = lambda: {
            key for other in self.sessions if other is not session for key in other.wanted()
        }
        self.sessions.append(session)
        return session

    def turn(self) -> None:
        """One round of the loop."""
        for session in self.sessions:
            session.drain()
        news = self.pool.turn()
        for session in self.sessions:
            session.tell(news)
        for session in [session for session in self.sessions if not session.alive()]:
            self.runs.forget(session)
            self.sessions.remove(session)
        self.runs.step()

    def serve(self) -> None:
        """Until the last script is over."""
        while self.sessions:
            self.turn()


def serve(arena: TwoSidedArena, dealer: Dealer, pool: Pool | None = None) -> Session:
    bench = Bench(arena, pool)
    session = bench.join(dealer)
    bench.serve()
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


def test_a_batch_is_overtaken_where_its_version_is_apart_and_one_without_a_version_is_answered(
    arena: TwoSidedArena,
) -> None:
    bench, other = Bench(arena), Key("other", VERSION, KEY.revision)
    bench.pool.ready = {key: loaded(FakeRunner(), key=key) for key in (KEY, other)}
    loads = [LOAD, LoadModel(2, "other", VERSION)]
    dealer = Dealer(
        loads, [batch(item(n, 1), number=n, model=model) for n, model in ((1, 1), (2, 3), (3, 1), (4, 2))], []
    )
    session = bench.join(dealer)
    for _ in range(2):
        session.drain()
    found = session.next([bench.pool.ready[KEY]])
    assert found is not None
    assert (found[0].key, found[1].batch) == (other, 4)
    assert [codes(message) for message in dealer.sent if isinstance(message, BatchDone)] == [{2: Code.NOT_READY}]
    session.begin(found[1])
    assert session.queued() == {KEY}
    assert session.next([bench.pool.ready[KEY]]) is None
    first = session.next()
    assert first is not None
    assert first[1].batch == 1


def test_a_loaded_version_is_confirmed_at_once(arena: TwoSidedArena) -> None:
    pool = Pool()
    pool.ready[KEY] = loaded(FakeRunner())
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
    assert session.cancelled == set()


def test_a_cancellation_is_forgotten_with_its_batch(arena: TwoSidedArena) -> None:
    dealer = Dealer([LOAD], [batch(item(1, 1), item(2, 2)), CancelItems([2])], [])
    session = serve(arena, dealer)
    assert codes(dealer.sent[-1]) == {1: None, 2: Code.CANCELLED}
    assert session.cancelled == set(), "else a worker that lives for months remembers every caller who left"


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
    assert pool.dropped == [KEY]
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
    pool.ready[KEY] = version = loaded(runner)
    version.row_cap = 2
    serve(arena, dealer, pool)
    assert dealer.sent[1].row_cap == 2, "the next gateway learns it, too"


def test_an_evicted_version_is_told_under_each_number_and_comes_back_when_it_is_asked_for(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    dealer = Dealer([LOAD, LoadModel(2, "toy", VERSION)], [], [batch(item(1, 1))], [LoadModel(2, "toy", VERSION)], [])
    other = Dealer([LoadModel(7, "toy", VERSION)], [], [], [], [])
    strange = Dealer([], [], [], [], [])
    for each in (dealer, other, strange):
        bench.join(each)
    bench.turn()
    del bench.pool.ready[KEY]
    note = MemoryNote(1000, 0, 5000, 120, 123, 1, 1, [])
    bench.pool.news = News(evicted=[KEY], memory=note)
    bench.serve()
    kinds = [(type(message), getattr(message, "model", None)) for message in dealer.sent[3:]]
    assert kinds == [(ModelEvicted, 1), (ModelEvicted, 2), (MemoryNote, None), (BatchDone, None), (ModelLoaded, 2)]
    assert codes(dealer.sent[6]) == {1: Code.NOT_READY}, "it crossed with the eviction; the gateway queues it again"
    assert other.sent[2:] == [ModelEvicted(7), note]
    assert strange.sent[1:] == [note]


def test_a_version_that_leaves_runs_what_was_there_and_nothing_new(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    dealer = Dealer([LOAD], [batch(item(1, 1), number=1), batch(item(2, 2), number=2)], [], [], [])
    session = bench.join(dealer)
    bench.turn()
    bench.turn()
    assert session.waiting() == {KEY}
    bench.pool.leaving = {KEY}
    dealer.turns[0].extend([batch(item(3, 3), number=3), LOAD])
    bench.serve()
    answers = {done.batch: codes(done) for done in dealer.sent if isinstance(done, BatchDone)}
    assert answers == {1: {1: None}, 2: {2: None}, 3: {3: Code.NOT_READY}}
    assert session.waiting() == set()
    assert len([message for message in dealer.sent if isinstance(message, ModelLoaded)]) == 2, "loaded anew"


def test_a_version_is_pinned_while_one_of_its_numbers_is(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    lazy = LoadModel(2, "toy", VERSION, pinned=False)
    steps: list[tuple[ToWorker, bool]] = [
        (lazy, False),
        (LOAD, True),
        (UnloadModel(1), False),
        (LOAD, True),
        (LoadModel(1, "toy", VERSION, pinned=False), False),
    ]
    session = bench.join(Dealer(*([message] for message, _ in steps), []))
    for message, pinned in steps:
        bench.turn()
        assert session.pinned() == ({KEY} if pinned else set()), message


def test_versions_of_earlier_gateways_are_forgotten_before_new_ones_load(arena: TwoSidedArena) -> None:
    pool = Pool(loaded(FakeRunner()))
    serve(arena, Dealer([KeepModels([tuple(KEY), ("other", "1" * 16, "")]), LOAD], []), pool)
    assert pool.kept == {KEY, Key("other", "1" * 16)}


def test_a_gateway_that_comes_is_told_of_the_memory_that_was_taken_before_it_came(arena: TwoSidedArena) -> None:
    pool = Pool(loaded(FakeRunner()))
    pool.noted = MemoryNote(100, 10, 50, 0, 0, 1, 0, [])
    dealer = Dealer([KeepModels([tuple(KEY)])], [])
    serve(arena, dealer, pool)
    assert pool.noted in dealer.sent


def test_what_is_under_way_is_finished_before_the_end_and_nothing_else(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    dealer = Dealer([LOAD], [batch(item(1, 1), number=1), batch(item(2, 1), number=2)], [], [])
    bench.join(dealer)
    bench.turn()
    bench.turn()
    bench.runs.finish_all()
    assert [done.batch for done in dealer.sent if isinstance(done, BatchDone)] == [1]


def test_a_gateway_that_takes_no_messages_holds_up_nobody_and_is_given_up(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    deaf, well = Dealer(*[[] for _ in range(9)]), Dealer([LOAD], [batch(item(1, 1))], *[[] for _ in range(9)])
    deaf.takes = False
    first, _ = bench.join(deaf), bench.join(well)
    for _ in range(3):
        bench.turn()
    assert codes(well.sent[-1]) == {1: None}
    assert first.is_waiting_to_send
    assert first.alive()
    bench.clock.now_s = SEND_LIMIT_S + 0.1
    bench.turn()
    assert not first.alive()


def test_what_could_not_be_said_is_said_later_in_order(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    dealer = Dealer([LOAD], [batch(item(1, 1))], *[[] for _ in range(9)])
    dealer.takes = False
    bench.join(dealer)
    for _ in range(3):
        bench.turn()
    dealer.takes = True
    bench.turn()
    assert [type(message) for message in dealer.sent] == [WorkerReady, ModelLoaded, BatchDone]


def test_an_answer_over_the_frame_limit_is_still_an_answer(arena: TwoSidedArena) -> None:
    dealer = Dealer([LOAD], [batch(item(1, 1))], [])
    dealer.too_big = 1
    serve(arena, dealer)
    assert codes(dealer.sent[-1]) == {1: Code.INTERNAL}


def test_work_of_a_gateway_that_is_gone_is_not_run(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    messages: list[ToWorker] = [LOAD]
    script: list[RunBatch] = [batch(item(1, 1))]
    dealer = Dealer(messages, script)  # nothing after the batch: the stream ends while it is being read
    serve(arena, dealer, Pool(loaded(runner)))
    assert runner.passes == []


def test_a_model_stays_while_another_gateway_wants_it(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    key = KEY
    first = Dealer([LOAD], [UnloadModel(1)], [batch(item(1, 1))], [], [])
    second = Dealer(
        [LoadModel(5, "toy", VERSION)], [], [batch(item(2, 1), model=5)], [KeepModels([])], [UnloadModel(5)], []
    )
    bench.join(first)
    bench.join(second)
    bench.serve()
    assert codes(first.sent[-1]) == {1: Code.NOT_READY}, "it has unloaded the model"
    assert codes(second.sent[-1]) == {2: None}, "this one has not"
    assert bench.pool.kept == set()
    assert bench.pool.dropped == [key], "with the last one"


def test_a_new_gateway_does_not_take_away_what_the_others_serve(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.join(Dealer([LOAD], [], [], []))
    bench.turn()
    bench.join(Dealer([KeepModels([("other", VERSION, "")])], [], []))
    bench.turn()
    assert bench.pool.kept == {KEY, Key("other", VERSION)}


def test_a_note_goes_to_every_gateway_with_the_version(arena: TwoSidedArena) -> None:
    bench = Bench(arena, Pool(loaded(FakeRunner("fp16", memory_rows=2))))
    first = Dealer([LOAD], [batch(item(1, 1), item(2, 2), item(3, 3))], [], [])
    second = Dealer([LoadModel(8, "toy", VERSION)], [], [], [])
    bench.join(first)
    bench.join(second)
    bench.serve()
    for dealer, model in ((first, 1), (second, 8)):
        assert [note for note in dealer.sent if isinstance(note, ModelNote)] == [ModelNote(model, "fp16", 1)]


def test_batches_of_a_gateway_that_is_gone_are_dropped_and_the_others_go_on(arena: TwoSidedArena) -> None:
    runner = FakeRunner()
    bench = Bench(arena, Pool(loaded(runner)))
    gone = Dealer([LOAD], [batch(item(1, 1), number=1), batch(item(2, 2), number=2)])
    well = Dealer([LOAD], [batch(item(3, 3), number=1), batch(item(4, 4), number=2)], [], [], [])
    bench.join(gone)
    bench.join(well)
    bench.serve()
    assert [rows for rows, _, _ in runner.passes if rows[0] >= 3] == [[3.0], [4.0]]
    assert [2.0] not in [rows for rows, _, _ in runner.passes], "nobody waits for it any more"
    assert [codes(done) for done in well.sent if isinstance(done, BatchDone)] == [{3: None}, {4: None}]


def test_each_gateway_sees_whether_the_device_works_for_it(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    dealers = [Dealer([LOAD], [batch(item(1, 1), number=number)], [], [], []) for number in (7, 9)]
    first, second = (bench.join(dealer).link.board.shown for dealer in dealers)  # type: ignore[attr-defined]  # a fake
    bench.serve()
    assert first == [7, IDLE, ELSEWHERE, IDLE]
    assert second == [ELSEWHERE, IDLE, 9, IDLE]


def prompt(job: int, model: int = 1) -> Generate:
    return Generate(job, model, 1e12, b"", b"")


def test_a_prompt_waits_for_its_version_and_keeps_it_busy(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    session = bench.join(Dealer([LOAD], [prompt(1), prompt(2), CancelJobs([2, 99])], [], []))
    bench.turn()
    bench.turn()
    assert session.waiting() == {KEY}
    new, cancelled = session.inbox.take()
    assert [(key, message.job) for key, message in new] == [(KEY, 1), (KEY, 2)]
    assert cancelled == [2]
    assert session.waiting() == set()


def test_a_prompt_for_a_model_that_is_not_there_or_leaves_is_answered(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    dealer = Dealer([LOAD], [prompt(1, model=9)], [prompt(2)], [])
    bench.join(dealer)
    bench.turn()
    bench.turn()
    bench.pool.leaving = {KEY}
    bench.turn()
    pieces = [piece for message in dealer.sent if isinstance(message, Generated) for piece in message.pieces]
    assert [(piece.job, piece.failure and piece.failure.code) for piece in pieces] == [
        (1, Code.NOT_READY),
        (2, Code.NOT_READY),
    ]


def test_pieces_over_the_frame_limit_come_in_parts_and_lose_nothing(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    dealer = Dealer([], [], [])
    session = bench.join(dealer)
    bench.turn()
    before = len(dealer.sent)
    dealer.too_big = 3
    tokens = [Token(number, b"a", -0.5) for number in range(5)]
    end = TextEnd(FinishReason.LENGTH, 1, 5)
    session.say([Piece(1, "a long text", tokens, end), Piece(2, "b")])
    pieces = [piece for message in dealer.sent[before:] if isinstance(message, Generated) for piece in message.pieces]
    assert len(pieces) == 4
    assert "".join(piece.text for piece in pieces if piece.job == 1) == "a long text"
    assert [token for piece in pieces if piece.job == 1 for token in piece.tokens] == tokens
    assert [piece.end for piece in pieces] == [None, None, end, None]
    assert pieces[-1] == Piece(2, "b")


def test_a_text_over_the_frame_limit_by_itself_is_told_so(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    dealer = Dealer([], [], [])
    session = bench.join(dealer)
    bench.turn()
    dealer.too_big = 1
    session.say([Piece(1, "a long text", end=TextEnd(FinishReason.LENGTH, 1, 1))])
    failure = Failure(Code.TOO_LARGE, "the text is too long for one answer")
    assert dealer.sent[-1] == Generated([Piece(1, failure=failure)])
