from gateway.worker_client import WorkerClient
from shared.messages import KeepModels, LoadModel, ModelLoaded, UnloadModel
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
