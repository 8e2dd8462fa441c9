from gateway.worker_client import MAX_FORGOTTEN, Worker, WorkerClient, WorkerEvents
from shared.errors import HeadraceError
from shared.messages import (
    PROTOCOL_VERSION,
    Failure,
    Hello,
    KeepModels,
    LoadModel,
    MemoryNote,
    ModelEvicted,
    ModelFailed,
    ModelLoaded,
    UnloadModel,
    Welcome,
    WorkerReady,
)
from shared.model_config import revision_of
from tests.support.gateway_parts import FakeRouter, connect_worker, welcome


def client() -> tuple[WorkerClient, FakeRouter]:
    router = FakeRouter()
    return WorkerClient(router, welcome), router  # type: ignore[arg-type]  # a fake with the port's names


def test_a_worker_is_told_all_versions_to_keep_and_then_to_load_them() -> None:
    workers, router = client()
    words, cats = LoadModel(1, "words", "a" * 16), LoadModel(2, "cats", "b" * 16)
    for load in (words, cats, LoadModel(3, "gone", "c" * 16)):
        workers.serve(load)
    workers.forget(3)
    connect_worker(workers)
    keep = KeepModels([("words", "a" * 16, revision_of(b"")), ("cats", "b" * 16, revision_of(b""))])
    assert [message for _, message in router.sent] == [keep, words, cats]


def test_a_worker_that_takes_messages_is_told_of_every_change() -> None:
    workers, router = client()
    connect_worker(workers)
    load = LoadModel(1, "words", "a" * 16)
    workers.serve(load)
    workers.forget(1)
    assert [message for _, message in router.sent] == [KeepModels([]), load, UnloadModel(1)]


def test_a_worker_says_of_which_models_it_pads_the_batches() -> None:
    workers, _ = client()
    worker = connect_worker(workers)
    for model, pads in ((1, True), (2, False)):
        workers.on_message(worker.identity, ModelLoaded(model, [], 0, "fp16", 0.1, pads))
    assert (worker.loaded, worker.pads) == ({1, 2}, {1})


def loads(router: FakeRouter) -> list[tuple[bytes, int]]:
    return [(identity, message.model) for identity, message in router.sent if isinstance(message, LoadModel)]


LAZY = LoadModel(1, "words", "a" * 16, b"", pinned=False)


def test_a_version_on_demand_is_asked_of_each_worker_once_and_again_of_one_that_comes_or_has_answered() -> None:
    workers, router = client()
    workers.serve(LAZY)
    first, second = connect_worker(workers), connect_worker(workers, name="worker-1")
    assert loads(router) == [], "a greeting loads only what is pinned"
    for _ in range(3):
        workers.demand(1)
    assert loads(router) == [(first.identity, 1), (second.identity, 1)]
    workers.on_message(first.identity, ModelLoaded(1, [], 0, "fp32", 0.1, pads=False))
    workers.on_message(second.identity, ModelFailed(1, Failure("not_ready", "no memory")))
    workers.demand(1)
    assert loads(router)[2:] == [(second.identity, 1)], "one has it, the other may have room by now"
    third = connect_worker(workers, name="worker-2")
    workers.demand(1)
    assert loads(router)[3:] == [(third.identity, 1)]


def test_a_version_that_was_given_up_can_be_asked_for_again() -> None:
    workers, router = client()
    workers.serve(LAZY)
    worker = connect_worker(workers, 1)
    workers.demand(1)
    assert loads(router) == []
    workers.on_message(worker.identity, ModelEvicted(1))
    assert (worker.loaded, workers.with_model(1)) == (set(), [])
    workers.demand(1)
    assert loads(router) == [(worker.identity, 1)]


def test_what_could_not_be_sent_was_not_asked() -> None:
    workers, router = client()
    workers.serve(LAZY)
    worker = connect_worker(workers)
    router.full = True
    workers.demand(1)
    router.full = False
    workers.demand(1)
    assert loads(router) == [(worker.identity, 1)]


def test_only_a_worker_that_takes_messages_is_asked_and_only_for_what_is_served_on_demand() -> None:
    workers, router = client()
    welcomed = workers.on_hello(Hello(PROTOCOL_VERSION, 1, "worker-0", "cpu"), 1)
    assert isinstance(welcomed, Welcome)
    workers.serve(LAZY)
    workers.serve(LoadModel(2, "cats", "b" * 16))
    workers.demand(1)
    assert router.sent == []
    workers.on_message(welcomed.identity, WorkerReady())
    sent = loads(router)
    for number in (2, 3):
        workers.demand(number)
    assert loads(router) == sent == [(welcomed.identity, 2)]


def test_a_worker_s_memory_is_kept_as_it_told_last_and_goes_with_it() -> None:
    workers, _ = client()
    worker = connect_worker(workers)
    assert workers.memory() == []
    for loaded in (1, 2):
        note = MemoryNote(8, loaded, 3, 0, 0, loaded, 0, [])
        workers.on_message(worker.identity, note)
        assert workers.memory() == [("worker-0", note)]
    workers.on_lost(worker.identity)
    assert workers.memory() == []


class Heard(WorkerEvents):
    def __init__(self) -> None:
        self.words: list[str] = []

    def model_loaded(self, worker: Worker, message: ModelLoaded, /) -> None:
        self.words.append(f"{worker.name} has {message.model}")

    def model_failed(self, worker: Worker, model: int, error: HeadraceError, /) -> None:
        self.words.append(f"{worker.name} can't: {error.text}")


def test_a_late_answer_about_a_version_that_was_let_go_is_told_to_nobody() -> None:
    workers, _ = client()
    heard = Heard()
    workers.connect([heard])
    worker = connect_worker(workers)
    workers.serve(LAZY)
    workers.forget(1)
    workers.on_message(worker.identity, ModelLoaded(1, [], 0, "fp32", 0.1, pads=True))
    workers.on_message(worker.identity, ModelFailed(1, Failure("not_ready", "no memory")))
    assert (heard.words, worker.loaded, worker.pads, worker.failed) == ([], set(), set(), {})
    workers.serve(LAZY)
    workers.on_message(worker.identity, ModelLoaded(1, [], 0, "fp32", 0.1, pads=True))
    assert heard.words == ["worker-0 has 1"]


def test_numbers_that_were_let_go_are_remembered_up_to_a_limit() -> None:
    workers, _ = client()
    for number in range(1, MAX_FORGOTTEN + 10):
        workers.serve(LoadModel(number, "words", "a" * 16))
        workers.forget(number)
        workers.forget(number)
    assert len(workers._forgotten) == MAX_FORGOTTEN
    assert list(workers._forgotten)[-1] == MAX_FORGOTTEN + 9
    assert workers._models == {}


def test_nothing_of_a_version_that_was_let_go_is_kept_with_a_worker() -> None:
    workers, router = client()
    workers.serve(LAZY)
    worker = connect_worker(workers)
    workers.demand(1)
    workers.forget(1)
    assert (worker.asked, worker.loaded, worker.pads, worker.failed) == (set(), set(), set(), {})
    assert router.sent[-1] == (worker.identity, UnloadModel(1))
