"""all-MiniLM-L6-v2 through the whole stack: vectors of mixed lengths beside one text at a time, in 32 bits and in 8."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from headrace import Client
from shared.repository import Repository
from tests.support.stack import Site, serving
from tests.support.zoo_parts import fetched
from workers.networks.minilm import minilm_l6

pytestmark = pytest.mark.alone  # company in a batch is a matter of time

WHOLE, EIGHT = "all-minilm-l6-v2", "all-minilm-l6-v2-int8"
PAIRS = (
    ("A man is eating food.", "A man is eating a piece of bread.", 0.76),
    ("How do I reset my password?", "I forgot my login credentials", 0.70),
)
WORDS = ("mill", "stands", "beside", "a", "quiet", "stream", "and", "its", "wheel", "turns", "slowly", "flour", "grain")

Vectors = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embeddings") / "models"
    for name in (WHOLE, EIGHT):
        fetched(name, root)
    return root


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Client]:
    site = Site(tmp_path_factory.mktemp("site"), root, batching={"max_rows": 8, "max_tokens": 512})
    with serving(site), Client(site.grpc, timeout_s=120) as client:
        yield client


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Sixty of 2 to 400 words, most of them short; two are cut."""
    chance = random.Random(5)  # noqa: S311 - the same ones each time
    lengths = [2, 400, 300, *(min(200, 2 + int(chance.paretovariate(0.9) * 3)) for _ in range(57))]
    return [" ".join(chance.choices(WORDS, k=length)).capitalize() + "." for length in lengths]


def through(client: Client, texts: list[str], model: str) -> tuple[Vectors, list[int]]:
    """All at once over one stream: the vectors, and the rows of each one's batch."""
    found = {outcome.index: outcome for outcome in client.embed_many(texts, model=model, in_flight=len(texts))}
    results = [found[index].result for index in range(len(texts))]
    assert all(results), [outcome.error for outcome in found.values() if outcome.error]
    vectors = np.array([result.values for result in results if result])
    return vectors, [result.server_timing.batch_rows for result in results if result]


@pytest.fixture(scope="module")
def reference(root: Path, texts: list[str]) -> Vectors:
    """One text at a time, by the library and the network alone."""
    files = Repository(root).open(WHOLE).files
    network = minilm_l6().eval()
    network.load_state_dict(load_file(files / "model.safetensors"))
    tokeniser = Tokenizer.from_file(str(files / "tokenizer.json"))
    tokeniser.no_padding()
    tokeniser.enable_truncation(256)
    vectors = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([tokeniser.encode(text).ids])
            states = network(ids, torch.ones_like(ids))[0]
            vectors.append(torch.nn.functional.normalize(states.mean(0), dim=0).double().numpy())
    return np.array(vectors)


def test_mixed_lengths_in_company_are_what_the_network_gives_for_one_text(
    client: Client, texts: list[str], reference: Vectors
) -> None:
    got, rows = through(client, texts, WHOLE)
    cosines = (got * reference).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(reference, axis=1)
    assert cosines.min() > 1 - 1e-4
    assert np.abs(got - reference).max() < 1e-5
    assert max(rows) > 2, "they never had company"


def test_eight_bits_mean_nearly_the_same(client: Client, texts: list[str], reference: Vectors) -> None:
    got, _ = through(client, texts, EIGHT)
    assert np.median((got * reference).sum(1)) > 0.9995
    assert (got * reference).sum(1).min() > 0.995  # activations are scaled by the batch


@pytest.mark.parametrize(("one", "other", "cosine"), PAIRS)
def test_like_sentences_are_as_alike_as_published(client: Client, one: str, other: str, cosine: float) -> None:
    first, second = (np.array(client.embed(text, model=WHOLE).values) for text in (one, other))
    assert float(first @ second) == pytest.approx(cosine, abs=0.03)
