"""The pool with a loader that works when the test says so, and a clock of its own."""

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.typing import EventDict

from shared.errors import Code
from shared.messages import Failure, MemoryNote
from shared.model_messages import ModelUse
from tests.support.worker_parts import FakeRunner, loaded
from workers.loaded import Key, LoadedVersion
from workers.loader_thread import Box, Estimated, Finished, GaveBack, Outcome
from workers.memory import GRACE_S, PATIENCE_S, SETTLE_S
from workers.model_pool import MAX_TRIES, ModelPool, News
from workers.pace import Pace

A, B, C, D = (Key(name, "0" * 16) for name in "abcd")
NAMES = (A, B, C, D)


class Thread:
    """Does one job per `work`; what is loaded has the bytes of `sizes`, and of `estimates` before that."""

    def __init__(self) -> None:
        self.pace = Pace(lambda: 0.0)
        self.sizes: dict[Key, int] = dict.fromkeys(NAMES, 40)
        self.estimates: dict[Key, int] = {}
        self.failing: set[Key] = set()
        self.jobs: deque[tuple[str, Key]] = deque()
        self.log: list[tuple[str, Key]] = []
        self._boxes: dict[Key, deque[Box]] = {key: deque() for key in NAMES}
        self._outcomes: list[Outcome] = []

    def fileno(self) -> int:
        return 0

    def estimate(self, key: Key, config: bytes) -> None:
        self.jobs.append(("estimate", key))

    def load(self, key: Key, config: bytes) -> None:
        self.jobs.append(("load", key))

    def give_back(self, key: Key, box: Box, event: str) -> None:
        self.jobs.append((event, key))
        self._boxes[key].append(box)

    def outcomes(self) -> list[Outcome]:
        found, self._outcomes = self._outcomes, []
        return found

    def close(self, limit_s: float) -> bool:
        return True

    def work(self) -> None:
        """The next job."""
        kind, key = self.jobs.popleft()
        self.log.append((kind, key))
        self._outcomes.append(self._done(kind, key))

    def _done(self, kind: str, key: Key) -> Outcome:
        if kind == "estimate":
            return Estimated(key, self.estimates.get(key, self.sizes[key]))
        if kind == "load" and key in self.failing:
            return Finished(key, Failure(Code.NOT_READY, "no"), 1000)
        if kind == "load":
            runner = FakeRunner()
            runner.memory_bytes = self.sizes[key]
            return Finished(key, [loaded(runner, key=key)], 1000)
        nbytes = self._boxes[key].popleft().pop().memory_bytes
        return GaveBack(nbytes - 1, nbytes, 900)


class Users:
    def __init__(self) -> None:
        self.waiting: set[Key] = set()
        self.under_way: list[LoadedVersion] = []
        self.pins: set[Key] = set()
        self.asked: set[Key] = set()

    def busy(self) -> set[Key]:
        return self.waiting | {version.key for version in self.under_way}

    def running(self) -> list[LoadedVersion]:
        return self.under_way

    def pinned(self) -> set[Key]:
        return self.pins

    def wanted(self) -> set[Key]:
        return self.asked


class Bench:
    """A pool of 100 bytes: room for two versions of 40."""

    def __init__(self, budget_bytes: int = 100) -> None:
        self.now_s = 0.0
        self.thread = Thread()
        self.users = Users()
        self.pool = ModelPool(self.thread, budget_bytes, lambda: self.now_s)
        self.pool.users = self.users
        self.news: list[News] = []

    def turn(self) -> News:
        news = self.pool.turn()
        self.news.append(news)
        return news

    def settle(self) -> None:
        """Until nothing more comes about by itself."""
        self.turn()
        while self.thread.jobs:
            self.thread.work()
            self.turn()

    def told(self) -> list[tuple[str, str]]:
        """All that was finished or evicted since the last call, in order."""
        told: list[tuple[str, str]] = []
        for news in self.news:
            told += [(key.name, "failed" if isinstance(what, Failure) else "loaded") for key, what in news.finished]
            told += [(key.name, "evicted") for key in news.evicted]
        self.news.clear()
        return told

    def use(self, *keys: Key) -> None:
        """One batch of each, a second apart."""
        for key in keys:
            self.now_s += 1.0
            version = self.pool.get(key)
            assert version is not None
            self.pool.ran(version, 2)

    def load(self, *keys: Key) -> None:
        """They are loaded, and have run, and are not kept any longer."""
        for key in keys:
            self.pool.want(key)
            self.settle()
            self.use(key)
        self.now_s += SETTLE_S
        self.told()

    def here(self) -> str:
        return "".join(key.name for key in NAMES if self.pool.get(key) is not None)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def failures(news: list[News]) -> Iterator[str]:
    for each in news:
        yield from (what.text for _, what in each.finished if isinstance(what, Failure))


def test_a_version_is_loaded_once_and_told_once(bench: Bench) -> None:
    for _ in range(3):
        bench.pool.want(A)
        bench.turn()
    bench.settle()
    bench.pool.want(A)
    bench.settle()
    assert bench.told() == [("a", "loaded")]
    assert bench.thread.log == [("estimate", A), ("load", A)]


def test_loads_come_in_the_order_asked_for_one_at_a_time(bench: Bench) -> None:
    for key in (C, A, B):
        bench.pool.want(key)
        bench.turn()
        assert len(bench.thread.jobs) == 1
    bench.thread.sizes = dict.fromkeys(NAMES, 30)
    bench.settle()
    assert bench.told() == [("c", "loaded"), ("a", "loaded"), ("b", "loaded")]


def test_the_least_recently_used_one_goes(bench: Bench) -> None:
    bench.load(A, B)
    bench.use(A)
    bench.pool.want(C)
    bench.settle()
    assert bench.told() == [("b", "evicted"), ("c", "loaded")]
    assert bench.here() == "ac"
    assert bench.thread.log[-3:] == [("estimate", C), ("model evicted", B), ("load", C)], "its memory is back by then"


def test_a_pinned_one_never_goes(bench: Bench, logged: list[EventDict]) -> None:
    bench.load(A, B)
    bench.users.pins = {A}
    bench.pool.want(C)
    bench.settle()
    assert bench.told() == [("b", "evicted"), ("c", "loaded")]
    bench.now_s += GRACE_S
    bench.users.pins = {A, C}
    bench.pool.want(D)
    bench.settle()
    (text,) = failures(bench.news)
    assert text == "there is no room for model d now (worker.memory_budget_bytes; the log has the details)"
    (said,) = [event["reason"] for event in logged if event["event"] == "model not loaded"]
    assert said.startswith("model d needs 0.0 MB, and worker.memory_budget_bytes is 0.0 MB, of which a (0.0 MB), c (0")
    assert bench.here() == "ac"


def test_what_is_loaded_at_the_start_is_pinned_until_a_gateway_speaks(bench: Bench) -> None:
    bench.pool.preload(A, b"")
    bench.settle()
    bench.use(A)
    bench.load(B)
    bench.pool.want(C)
    bench.settle()
    assert bench.told() == [("b", "evicted"), ("c", "loaded")]
    bench.use(C)
    bench.users.asked = {A}
    bench.pool.want(D)
    bench.settle()
    assert bench.told() == [("a", "evicted"), ("d", "loaded")], "a gateway wants it, unpinned"


def test_one_in_use_never_goes_and_the_load_waits_for_it(bench: Bench) -> None:
    bench.load(A, B)
    bench.users.waiting = {A}
    version = bench.pool.get(B)
    assert version is not None
    bench.users.under_way = [version]
    bench.pool.want(C)
    bench.settle()
    assert (bench.told(), bench.here()) == ([], "ab")
    assert bench.pool.sleep_s() == PATIENCE_S
    bench.users.under_way = []
    bench.settle()
    assert bench.told() == [("b", "evicted"), ("c", "loaded")]
    assert bench.pool.sleep_s() is None


def test_how_long_it_waited_for_memory_is_told(bench: Bench) -> None:
    bench.load(A, B)
    bench.users.waiting = {A, B}
    bench.pool.want(C)
    bench.settle()
    bench.now_s += 3.0
    bench.users.waiting = {A}
    bench.settle()
    version = bench.pool.get(C)
    assert version is not None
    assert version.stages_s == {"wait": 3.0}
    assert version.estimated_bytes == 40


def test_a_new_one_stays_until_it_has_run_a_batch_or_for_a_while(bench: Bench) -> None:
    bench.pool.want(A)
    bench.settle()
    bench.now_s += 1.0
    bench.pool.want(B)
    bench.settle()
    bench.pool.want(C)
    bench.settle()
    assert bench.told() == [("a", "loaded"), ("b", "loaded")]
    assert bench.pool.sleep_s() == GRACE_S - 1.0
    bench.use(B)
    bench.settle()
    assert (bench.told(), bench.pool.sleep_s()) == ([], SETTLE_S), "that was the proof: what waits for it comes next"
    bench.now_s += SETTLE_S
    bench.settle()
    assert bench.told() == [("b", "evicted"), ("c", "loaded")], "the other one has not run yet"
    bench.pool.want(D)
    bench.now_s = GRACE_S
    bench.settle()
    assert bench.told() == [("a", "evicted"), ("d", "loaded")]


def test_a_new_one_may_go_when_it_has_run_what_it_was_loaded_for(bench: Bench) -> None:
    for key in (A, B):
        bench.pool.want(key)
        bench.settle()
    bench.use(A, A)
    bench.pool.want(C)
    bench.settle()
    assert bench.told() == [("a", "loaded"), ("b", "loaded"), ("a", "evicted"), ("c", "loaded")]


def test_one_dropped_with_a_batch_under_way_is_not_sent_away_once_more(bench: Bench) -> None:
    bench.load(A, B)
    version = bench.pool.get(A)
    assert version is not None
    bench.users.under_way = [version]
    bench.users.waiting = {B}
    bench.pool.drop(A)
    bench.pool.want(C)
    bench.settle()
    bench.now_s += PATIENCE_S
    bench.settle()
    assert (bench.told(), bench.here()) == ([], "b")
    bench.users.under_way = []
    bench.settle()
    assert bench.told() == [("c", "loaded")]


def test_under_steady_load_those_that_would_go_next_get_no_more_batches(bench: Bench) -> None:
    bench.load(A, B)
    bench.users.waiting = {A, B}
    bench.pool.want(C)
    bench.settle()
    bench.now_s += PATIENCE_S
    bench.settle()
    assert bench.told() == [("a", "evicted")], "for the gateways"
    assert not bench.pool.takes(A)
    assert bench.pool.takes(B)
    assert bench.pool.get(A) is not None, "it still runs what was there"
    bench.settle()
    bench.pool.want(A)
    assert bench.told() == []
    bench.users.waiting = {B}
    bench.settle()
    assert bench.told() == [("c", "loaded")], "told once"
    bench.use(C)
    bench.users.waiting = set()
    bench.settle()
    assert bench.told() == [("b", "evicted"), ("a", "loaded")]


@pytest.mark.parametrize("estimate", [101, 10])
def test_what_can_never_fit_says_so_before_the_load_or_after_it(bench: Bench, estimate: int) -> None:
    bench.thread.sizes[A] = 101
    bench.thread.estimates[A] = estimate
    bench.load(B)
    bench.pool.want(A)
    bench.settle()
    (text,) = failures(bench.news)
    assert text == "model a needs 0.0 MB, and worker.memory_budget_bytes is 0.0 MB: raise it"
    assert bench.here() == "b", "nobody went for its sake"
    loads = bench.thread.log.count(("load", A))
    bench.pool.want(A)
    bench.settle()
    assert len(list(failures(bench.news))) == 2
    assert bench.thread.log.count(("load", A)) == loads, "its size is known"


def test_what_is_larger_than_promised_makes_others_go_after_the_load(bench: Bench) -> None:
    bench.load(A, B)
    bench.thread.estimates[C] = 20
    bench.pool.want(C)
    bench.settle()
    assert bench.told() == [("c", "loaded"), ("a", "evicted")]


def test_what_is_larger_than_promised_gives_way_to_those_in_use_and_comes_back(bench: Bench) -> None:
    bench.load(A, B)
    bench.thread.estimates[C] = 20
    bench.users.waiting = {A, B}
    bench.pool.want(C)
    bench.settle()
    assert bench.told() == []
    assert bench.thread.log[-2:] == [("load", C), ("model does not fit", C)]
    bench.users.waiting = {A}
    bench.settle()
    assert bench.told() == [("b", "evicted"), ("c", "loaded")]


def test_what_grows_with_each_load_is_given_up(bench: Bench) -> None:
    bench.load(A, B)
    bench.users.waiting = {A, B}
    bench.thread.estimates[C] = 11
    bench.pool.want(C)
    for tries in range(1, MAX_TRIES + 1):
        bench.thread.sizes[A] = 100 - 40 - 10 * tries
        bench.thread.sizes[C] = 20 + tries
        bench.settle()
        if tries < MAX_TRIES:
            assert bench.told() == []
            # Room for what it was measured at, and not for what it will be.
            version = bench.pool.get(A)
            assert version is not None
            version.runner.memory_bytes = 100 - 40 - (20 + tries)
    assert bench.told() == [("c", "failed")]


def test_a_failed_load_can_be_tried_again_and_holds_up_nobody(bench: Bench) -> None:
    bench.thread.failing = {A}
    bench.pool.want(A)
    bench.pool.want(B)
    bench.settle()
    assert bench.told() == [("a", "failed"), ("b", "loaded")]
    bench.thread.failing = set()
    bench.pool.want(A)
    bench.settle()
    assert bench.told() == [("a", "loaded")]


def test_a_version_dropped_in_line_or_while_it_loads_leaves_nothing(bench: Bench) -> None:
    bench.pool.want(A)
    bench.pool.want(B)
    bench.turn()
    bench.thread.work()
    bench.turn()
    bench.pool.drop(B)
    bench.pool.drop(A)
    bench.settle()
    assert (bench.told(), bench.here()) == ([], "")
    assert bench.thread.log == [("estimate", A), ("load", A), ("model dropped while it was loaded", A)]
    bench.pool.want(A)
    bench.settle()
    assert bench.told() == [("a", "loaded")]


def test_a_version_dropped_and_wanted_again_while_it_loads_is_kept(bench: Bench) -> None:
    bench.pool.want(A)
    bench.turn()
    bench.thread.work()
    bench.turn()
    bench.pool.drop(A)
    bench.pool.want(A)
    bench.settle()
    assert bench.told() == [("a", "loaded")]
    assert bench.thread.log == [("estimate", A), ("load", A)]


def test_an_unloaded_version_goes_after_the_batch_that_is_under_way(bench: Bench) -> None:
    bench.load(A, B)
    version = bench.pool.get(A)
    assert version is not None
    bench.users.under_way = [version]
    del version
    bench.pool.drop(A)
    bench.pool.want(C)
    bench.settle()
    assert bench.told() == [("b", "evicted"), ("c", "loaded")], "its memory is still in use"
    assert bench.here() == "c"
    bench.users.under_way = []
    bench.settle()
    assert bench.thread.log[-1] == ("model unloaded", A)


def test_only_what_is_kept_stays(bench: Bench) -> None:
    bench.load(A, B)
    bench.pool.want(C)
    bench.turn()
    bench.pool.keep({B, D})
    bench.settle()
    assert (bench.told(), bench.here()) == ([], "b")


def test_a_note_tells_the_figures(bench: Bench) -> None:
    bench.load(A, B)
    bench.use(A)
    bench.users.pins = {A}
    bench.pool.want(C)
    bench.settle()
    notes = [news.memory for news in bench.news if news.memory is not None]
    gone, note = notes
    assert gone == MemoryNote(100, 40, 900, 39, 40, 2, 1, gone.uses)
    assert note == MemoryNote(
        100,
        80,
        1000,
        39,
        40,
        3,
        1,
        [
            ModelUse("a", "0" * 16, 40, pinned=True, batches=2, rows=4, per_minute=note.uses[0].per_minute, idle_s=0.0),
            ModelUse("c", "0" * 16, 40, pinned=False, batches=0, rows=0, per_minute=0.0, idle_s=0.0),
        ],
    )
    assert 1.9 < note.uses[0].per_minute < 2.0
    bench.pool.drop(A)
    bench.settle()
    assert bench.news[-1].memory is not None
    assert bench.news[-1].memory.models_bytes == 40


def test_while_batches_run_it_is_told_every_ten_seconds_how_much_each_version_is_used(bench: Bench) -> None:
    assert bench.pool.memory() is None
    bench.load(A)
    bench.news.clear()
    for _ in range(40):
        bench.use(A)
        bench.turn()
    told = [news.memory.uses[0].batches for news in bench.news if news.memory is not None]
    assert 3 <= len(told) <= 5
    assert told == sorted(told)
    bench.now_s += 60.0
    bench.turn()  # the last batches are told of, and then nothing more
    for _ in range(20):
        bench.now_s += 1.0
        bench.turn()
    assert [news.memory for news in bench.news[-20:]] == [None] * 20
    now = bench.pool.memory()
    assert now is not None
    assert (now.models_bytes, now.uses[0].batches) == (40, 41)


STEPS = st.lists(
    st.tuples(
        st.sampled_from([*["want", "work"] * 4, *["queue"] * 3, *["start", "end", "later"] * 2, "drop", "pin"]),
        st.integers(0, 2),
    ),
    min_size=40,
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.tuples(*[st.integers(20, 60)] * 3), st.integers(60, 120))
def test_whatever_happens_the_budget_holds_nobody_in_use_goes_and_every_want_is_answered(
    steps: list[tuple[str, int]], sizes: tuple[int, ...], budget_bytes: int
) -> None:
    model = Model(budget_bytes, dict(zip(NAMES, sizes, strict=False)))
    for step, number in steps:
        model.do(step, NAMES[number])
    model.finish()
    assert not model.open_wants


class Model:
    """Gateways that behave, and what must always be true."""

    def __init__(self, budget_bytes: int, sizes: dict[Key, int]) -> None:
        self.bench = Bench(budget_bytes)
        self.bench.thread.sizes = sizes
        self.budget_bytes = budget_bytes
        self.open_wants: set[Key] = set()
        self.served: set[Key] = set()
        """Loaded as far as the gateways know."""

    def do(self, step: str, key: Key) -> None:
        bench, pool, users = self.bench, self.bench.pool, self.bench.users
        match step:
            case "want" if key not in self.served:
                users.asked.add(key)
                self.open_wants.add(key)
                pool.want(key)
            case "queue" if pool.takes(key):
                users.waiting.add(key)
            case "start" if key in users.waiting and not users.under_way:
                users.waiting.discard(key)
                version = pool.get(key)
                assert version is not None, "a version with a batch that waits has gone"
                users.under_way.append(version)
            case "end" if users.under_way:
                pool.ran(users.under_way.pop(), 1)
            case "drop":
                for known in (users.asked, users.waiting, users.pins, self.open_wants, self.served):
                    known.discard(key)
                pool.drop(key)
            case "work" if bench.thread.jobs:
                bench.thread.work()
            case "pin" if key in users.asked:
                users.pins ^= {key}
            case "later":
                bench.now_s += GRACE_S / 2
        self.look()

    def look(self) -> None:
        bench = self.bench
        news = bench.turn()
        for key, _ in news.finished:
            assert key in self.open_wants, "told without being asked"
            self.open_wants.discard(key)
        self.served |= {key for key, what in news.finished if isinstance(what, LoadedVersion)}
        self.served -= set(news.evicted)
        here = [version for key in NAMES if (version := bench.pool.get(key)) is not None]
        coming = [bench.thread.sizes[key] for kind, key in bench.thread.jobs if kind == "load"]
        assert sum(version.memory_bytes for version in here) + sum(coming) <= self.budget_bytes
        assert {version.key for version in here} >= bench.users.waiting, "a version in use has gone"
        assert all(bench.pool.takes(key) for key in self.served), "the gateways were not told"

    def finish(self) -> None:
        """Every model has batches without end: what was asked for must be answered all the same."""
        self.bench.users.pins.clear()
        for _ in range(40):
            for key in NAMES:
                self.do("start", key)
                self.do("queue", key)
                self.do("end", key)
            while self.bench.thread.jobs:
                self.do("work", A)
            self.do("later", A)
