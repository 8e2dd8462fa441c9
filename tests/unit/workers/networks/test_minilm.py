import math

import pytest
import torch
from torch.nn import functional

from workers.networks.minilm import HEADS, VOCABULARY, WIDTH, MiniLM, minilm_l6


@pytest.fixture(scope="module")
def network() -> MiniLM:
    torch.manual_seed(1)
    return minilm_l6().eval()


def test_it_has_the_published_size_and_names(network: MiniLM) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert len(shapes) == 101
    assert sum(math.prod(shape) for shape in shapes.values()) == 22_565_376
    assert shapes["embeddings.word_embeddings.weight"] == (30522, 384)
    assert shapes["encoder.layer.5.attention.self.query.bias"] == (384,)
    assert shapes["encoder.layer.0.attention.output.LayerNorm.weight"] == (384,)
    assert shapes["encoder.layer.0.intermediate.dense.weight"] == (1536, 384)
    assert shapes["encoder.layer.3.output.dense.weight"] == (384, 1536)


def _tokens(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(1, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(2))
    return tokens.masked_fill(~mask, 0), mask.long()


def test_padding_changes_nothing(network: MiniLM) -> None:
    tokens, mask = _tokens(3, 17, 40)
    with torch.inference_mode():
        together = network(tokens, mask)
        for row, length in enumerate((3, 17, 40)):
            alone = network(tokens[row : row + 1, :length], mask[row : row + 1, :length])
            torch.testing.assert_close(together[row, :length], alone[0], atol=2e-5, rtol=1e-4)


def test_what_stands_in_the_padding_does_not_matter(network: MiniLM) -> None:
    tokens, mask = _tokens(5, 9)
    other = tokens.masked_fill(mask == 0, 4711)
    with torch.inference_mode():
        torch.testing.assert_close(network(tokens, mask)[0, :5], network(other, mask)[0, :5], atol=1e-6, rtol=0)


def test_a_row_that_is_all_padding_stays_finite(network: MiniLM) -> None:
    with torch.inference_mode():
        assert network(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


def test_a_layer_is_the_textbooks(network: MiniLM) -> None:
    layer, x = network.encoder["layer"][0], torch.randn(2, 6, WIDTH)  # type: ignore[index]  # a list of layers
    with torch.inference_mode():
        own = layer.attention["self"]
        query, key, value = (
            own[name](x).view(2, 6, HEADS, -1).permute(0, 2, 1, 3) for name in ("query", "key", "value")
        )
        mixed = (query @ key.transpose(2, 3) / math.sqrt(WIDTH // HEADS)).softmax(3) @ value
        mixed = mixed.permute(0, 2, 1, 3).reshape(2, 6, WIDTH)
        output = layer.attention["output"]
        attended = output["LayerNorm"](x + output["dense"](mixed))
        inner = functional.gelu(layer.intermediate["dense"](attended))
        expected = layer.output["LayerNorm"](attended + layer.output["dense"](inner))
        torch.testing.assert_close(layer(x, torch.zeros(2, 1, 1, 6)), expected, atol=1e-5, rtol=1e-4)
