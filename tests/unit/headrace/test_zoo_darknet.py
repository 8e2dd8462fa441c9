import numpy as np
import pytest
import torch
from torch.nn import functional

from headrace.zoo_darknet import folded
from shared.errors import StartupError

SHAPES = ((3, 4, 3), (4, 2, 1))
LINEAR = (1,)


def _file(random: np.random.Generator) -> tuple[bytes, dict[str, np.ndarray]]:
    parts = {
        "beta": random.normal(size=4),
        "gamma": random.normal(size=4),
        "mean": random.normal(size=4),
        "variance": random.uniform(0.1, 2, size=4),
        "weight": random.normal(size=(4, 3, 3, 3)),
        "bias": random.normal(size=2),
        "head": random.normal(size=(2, 4, 1, 1)),
    }
    numbers = np.concatenate([part.ravel() for part in parts.values()]).astype("<f4")
    return bytes(20) + numbers.tobytes(), parts


def test_batch_norm_is_folded_as_darknet_computes_it() -> None:
    random = np.random.default_rng(1)
    raw, parts = _file(random)
    tensors = folded(raw, SHAPES, LINEAR)
    picture = torch.from_numpy(random.normal(size=(1, 3, 8, 8)).astype("f4"))
    got = functional.conv2d(picture, tensors["convolutions.0.weight"], tensors["convolutions.0.bias"])
    plain = functional.conv2d(picture, torch.from_numpy(parts["weight"].astype("f4"))).numpy()
    lifted = {name: part[:, None, None] for name, part in parts.items() if part.shape == (4,)}
    expected = lifted["gamma"] * (plain[0] - lifted["mean"]) / (np.sqrt(lifted["variance"]) + 1e-6) + lifted["beta"]
    np.testing.assert_allclose(got[0].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_head_is_taken_as_it_is() -> None:
    raw, parts = _file(np.random.default_rng(2))
    tensors = folded(raw, SHAPES, LINEAR)
    np.testing.assert_array_equal(tensors["convolutions.1.weight"].numpy(), parts["head"].astype("f4"))
    np.testing.assert_array_equal(tensors["convolutions.1.bias"].numpy(), parts["bias"].astype("f4"))


@pytest.mark.parametrize(
    ("change", "sentence"), [(-4, "ends before the network does"), (4, "has 1 numbers more than the network")]
)
def test_every_number_is_used(change: int, sentence: str) -> None:
    raw, _ = _file(np.random.default_rng(3))
    with pytest.raises(StartupError, match=sentence):
        folded(raw[:change] if change < 0 else raw + bytes(change), SHAPES, LINEAR)
