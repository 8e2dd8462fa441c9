"""Graphs of batches that differ in length, too, on a device of simulated time."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.pipelines.text_embedding import TextEmbedding, TextEmbeddingConfig
from shared.settings import BatchingSettings
from shared.tensors import Array
from tests.support.fake_streams import FakeDevice, FakeStreams
from tests.support.text_parts import tiny_bert, write_tokeniser
from workers.backends.stream_runner import StreamRunner
from workers.warm_up import Steps, warm_up

LENGTHS = (8, 16)


@pytest.fixture
def pipeline(tmp_path: Path) -> TextEmbedding:
    write_tokeniser(tmp_path)
    config = msgspec.convert({"max_tokens": 16, "lengths": LENGTHS, "vocabulary": 60}, TextEmbeddingConfig)
    return TextEmbedding(config, tmp_path, ())


def texts(*lengths: int) -> list[list[Array]]:
    generator = np.random.default_rng(sum(lengths))
    return [[generator.integers(4, 60, (1, length), dtype=np.int32)] for length in lengths]


def test_each_size_of_each_length_has_a_graph_that_answers_as_the_network_does(pipeline: TextEmbedding) -> None:
    streams = FakeStreams()
    runner = StreamRunner(tiny_bert(), pipeline, FakeDevice(streams), "fp32")
    plain = StreamRunner(tiny_bert(), pipeline, FakeDevice(FakeStreams()), "fp32")
    batching = BatchingSettings(max_rows=4, sizes=(1, 2, 4))
    warm_up(runner, pipeline, batching, "toy", Steps(lambda: False, lambda _: None), graphs=True)
    assert len(runner.graphs) == 6
    assert len(set(map(id, streams.pools))) == 1
    for lengths, size in [((3,), 1), ((3, 8), 2), ((9, 2, 16), 4), ((5, 5, 5, 5), 4), ((16,), 1)]:
        items = texts(*lengths)
        replays = len(streams.of("computing", "replay"))
        got = runner.run(items, size, "fp32").outputs[0].astype(np.float32)
        assert len(streams.of("computing", "replay")) == replays + 1, lengths
        expected = plain.run(items, size, "fp32").outputs[0].astype(np.float32)
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_what_is_longer_than_all_runs_without_one(pipeline: TextEmbedding) -> None:
    streams = FakeStreams()
    runner = StreamRunner(tiny_bert(), pipeline, FakeDevice(streams), "fp32")
    warm_up(
        runner,
        pipeline,
        BatchingSettings(max_rows=2, sizes=(1, 2)),
        "toy",
        Steps(lambda: False, lambda _: None),
        graphs=True,
    )
    replays = len(streams.of("computing", "replay"))
    assert runner.run(texts(17), 1, "fp32").finite.all()
    assert len(streams.of("computing", "replay")) == replays
