import pytest
import torch
from torch.nn import functional

from workers.networks.yolov3_tiny import LINEAR, SHAPES, yolov3_tiny


def test_it_has_the_published_size() -> None:
    with torch.device("meta"):
        network = yolov3_tiny()
    numbers = sum(parameter.numel() for parameter in network.parameters())
    norms = sum(3 * shape[1] for number, shape in enumerate(SHAPES) if number not in LINEAR)
    assert numbers + norms == 8_858_734, "what Darknet's file holds; the batch norms are folded"


@pytest.mark.parametrize("side", [32, 64, 416])
def test_two_maps(side: int) -> None:
    network = yolov3_tiny().eval()
    with torch.inference_mode():
        coarse, fine = network(torch.zeros(2, 3, side, side))
    assert coarse.shape == (2, 255, side // 32, side // 32)
    assert fine.shape == (2, 255, side // 16, side // 16)


def test_the_pool_of_stride_1_keeps_the_size_and_looks_over_the_right_and_lower_edge() -> None:
    network = yolov3_tiny().eval()
    seen: list[torch.Tensor] = []
    network.convolutions[6].register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    stepped: list[torch.Tensor] = []
    network.convolutions[5].register_forward_hook(lambda _module, _given, out: stepped.append(out))
    with torch.inference_mode():
        network(torch.rand(1, 3, 96, 96) - 0.5)
    before = functional.leaky_relu(stepped[0], 0.1)
    # Darknet's own: the lowest number stands where there is no pixel.
    lowest = functional.pad(before, (0, 1, 0, 1), value=torch.finfo(torch.float32).min)
    assert torch.equal(seen[0], functional.max_pool2d(lowest, 2, stride=1))
