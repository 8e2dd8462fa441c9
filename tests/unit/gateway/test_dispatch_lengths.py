"""Texts of different lengths between pool and worker: which share a batch, and what a batch is expected to cost."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gateway.batcher import BatchLimits, QueueKey
from gateway.served import ServedModel
from gateway.state import ModelState
from shared.clock import FOREVER_S
from shared.messages import ModelLoaded
from shared.pipelines.text_embedding import TextEmbedding, TextEmbeddingConfig
from shared.tensors import Tensor
from tests.support.dispatch_bench import Bench
from tests.support.gateway_parts import connect_worker

LIMITS = BatchLimits(4, 10.0, (1, 2, 4), max_tokens=64)
LOADED = ModelLoaded(
    1, [(1, 0.001), (4, 0.004)], 10, "fp32", 0.1, pads=False,
    buckets=[((16,), [(1, 0.001), (4, 0.004)]), ((32,), [(1, 0.1), (2, 0.2)]), ((64,), [(1, 5.0)])],
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    (tmp_path / "tokenizer.json").write_text("{}")  # the gateway never opens it
    pipeline = TextEmbedding(TextEmbeddingConfig(max_tokens=64), tmp_path, ())
    return ServedModel(1, ModelState("texts", "0" * 16, "ready"), pipeline, LIMITS)


async def submit(bench: Bench, model: ServedModel, *lengths: int) -> None:
    for length in lengths:
        tensor = Tensor("tokens", "INT32", (1, length), bytes(4 * length))
        bench.dispatch.submit(model, [tensor], await bench.lease(model), FOREVER_S)
    await asyncio.sleep(0)


def sent(bench: Bench) -> list[list[int]]:
    """The lengths in each batch so far."""
    return [sorted(item.tensors[0].shape[1] for item in batch.items) for batch in bench.router.batches()]


async def test_texts_of_one_length_share_a_batch(bench: Callable[..., Bench], model: ServedModel) -> None:
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    await submit(b, model, 3, 40, 9, 16, 17)
    for number in range(3):  # an idle worker is given one batch at a time
        b.answer(worker, b.router.batches()[number])
    assert sent(b) == [[3, 9, 16], [40], [17]]


async def test_a_batch_is_staged_when_its_tokens_are_the_budget(
    bench: Callable[..., Bench], model: ServedModel
) -> None:
    b = bench(model)
    b.workers.on_message(connect_worker(b.workers).identity, LOADED)
    await submit(b, model, 60)  # runs for 5 s
    await submit(b, model, 20)
    assert sent(b) == [[60]]
    await submit(b, model, 3)
    assert sent(b) == [[60]], "the one row of another length fills nothing"
    await submit(b, model, 30)
    assert sent(b) == [[60], [20, 30]], "two rows of 32 are 64 tokens"


async def test_what_each_length_costs_is_known_from_the_warm_up(
    bench: Callable[..., Bench], model: ServedModel
) -> None:
    b = bench(model)
    worker = connect_worker(b.workers)
    loaded = msgspec.msgpack.decode(msgspec.msgpack.encode(LOADED), type=ModelLoaded)  # as it comes over the wire
    b.workers.on_message(worker.identity, loaded)
    predict = b.dispatch._cost.predict
    assert predict(QueueKey(1, (16,)), 4) == pytest.approx(0.004)
    assert predict(QueueKey(1, (32,)), 2) == pytest.approx(0.2)
    assert predict(QueueKey(1, (64,)), 1) == pytest.approx(5.0)
    assert model.batch_s(1) == pytest.approx(0.1), "the middle one, until batches have shown what comes"
