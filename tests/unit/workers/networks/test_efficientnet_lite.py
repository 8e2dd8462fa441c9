import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.networks import efficientnet_lite as lite
from workers.padding import pad_same, same_padding

PARAMETERS = {0: 4_652_008, 1: 5_416_680, 2: 6_092_072, 3: 8_197_096, 4: 13_006_568}
"""Of the published checkpoints."""


@pytest.mark.parametrize("variant", PARAMETERS)
def test_the_variants_have_the_published_sizes(variant: int) -> None:
    with torch.device("meta"):
        network = getattr(lite, f"efficientnet_lite{variant}")()
    assert sum(parameter.numel() for parameter in network.parameters()) == PARAMETERS[variant]


def test_names_are_those_of_the_published_weights() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in lite.efficientnet_lite0().state_dict().items()}
    assert len(shapes) == 296
    assert shapes["_conv_stem.weight"] == (32, 3, 3, 3)
    assert shapes["_blocks.0._depthwise_conv.weight"] == (32, 1, 3, 3)
    assert "_blocks.0._expand_conv.weight" not in shapes
    assert shapes["_blocks.3._expand_conv.weight"] == (144, 24, 1, 1)
    assert shapes["_blocks.15._bn2.running_var"] == (320,)
    assert shapes["_bn1.num_batches_tracked"] == ()
    assert shapes["_fc.weight"] == (1000, 1280)


def test_logits_for_any_image_size() -> None:
    network = lite.efficientnet_lite0().eval()
    with torch.inference_mode():
        for size in (32, 33, 47):
            assert network(torch.zeros(2, 3, size, size)).shape == (2, 1000)


@given(st.integers(1, 300), st.sampled_from([1, 3, 5]), st.sampled_from([1, 2, 3]))
def test_same_padding_gives_exactly_the_windows_it_should(size: int, kernel: int, stride: int) -> None:
    before, after = same_padding(size, kernel, stride)
    assert 0 <= after - before <= 1
    assert (size + before + after - kernel) // stride + 1 == -(-size // stride)


def test_the_odd_pixel_goes_to_the_bottom_and_right() -> None:
    padded = pad_same(torch.ones(1, 1, 4, 5), 3, 2)
    assert padded[0, 0, 0].tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert padded[0, 0, :, 1].tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("channels", "width", "expected"), [(32, 1.0, 32), (24, 1.1, 24), (80, 1.1, 88), (16, 1.4, 24)]
)
def test_channels_are_multiples_of_eight(channels: int, width: float, expected: int) -> None:
    assert lite.scaled_channels(channels, width) == expected
