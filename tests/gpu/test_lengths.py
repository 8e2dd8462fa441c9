"""Texts of different lengths on a real device: padded rows, one copy a batch, a graph per size and length."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.pipelines.text_embedding import TextEmbedding, TextEmbeddingConfig
from shared.settings import BatchingSettings
from shared.tensors import Array
from tests.support.text_parts import tiny_bert, vocabulary, write_tokeniser
from workers.backends.stream_runner import StreamRunner
from workers.backends.torch_device import CudaDevice, find
from workers.backends.torch_runner import TorchRunner
from workers.warm_up import Steps, warm_up

SIZES = (1, 2, 4, 8)


@pytest.fixture
def cuda() -> CudaDevice:
    device = find("cuda:0", 0, 1)
    assert isinstance(device, CudaDevice)
    return device


@pytest.fixture
def pipeline(tmp_path: Path) -> TextEmbedding:
    write_tokeniser(tmp_path)
    given = {"max_tokens": 64, "vocabulary": len(vocabulary())}
    return TextEmbedding(msgspec.convert(given, TextEmbeddingConfig), tmp_path, ())


def texts(generator: np.random.Generator, count: int) -> list[list[Array]]:
    lengths = generator.integers(1, 65, count)
    return [[generator.integers(4, 60, (1, length), dtype=np.int32)] for length in lengths]


def test_every_size_and_length_answers_as_a_cpu_does_and_has_a_graph(cuda: CudaDevice, pipeline: TextEmbedding) -> None:
    runner = StreamRunner(tiny_bert().to(cuda.device), pipeline, cuda, "fp32")
    cuda.streams.settle()
    plain = TorchRunner(tiny_bert(), pipeline, find("cpu", 0, 1), "fp32")
    batching = BatchingSettings(max_rows=8, sizes=SIZES, max_tokens=256)
    warmth = warm_up(runner, pipeline, batching, "tiny", Steps(lambda: False, lambda _: None), graphs=True)
    assert [bucket for bucket, _ in warmth.buckets] == [(16,), (32,), (64,)]
    assert [len(measured) for _, measured in warmth.buckets] == [4, 4, 3]
    assert len(runner.graphs) == 11
    generator = np.random.default_rng(0)
    for _ in range(50):
        items = texts(generator, int(generator.integers(1, 9)))
        padded = next(size for size in SIZES if size >= len(items))
        got = runner.run(items, padded, "fp32")
        assert got.finite.all()
        expected = plain.run(items, padded, "fp32").outputs[0].astype(np.float32)
        np.testing.assert_allclose(got.outputs[0].astype(np.float32), expected, atol=1e-4)
