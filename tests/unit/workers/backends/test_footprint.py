import torch
from torch import nn

from workers.backends import footprint
from workers.backends.cpu_graph import optimise

CPU = torch.device("cpu")


class Hoarder(nn.Module):
    """Keeps tensors in all places where a module may have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))
        self.register_buffer("buffer", torch.zeros(10, dtype=torch.int64))
        self.plain = torch.zeros(1000, dtype=torch.uint8)
        self.table = {3: torch.zeros(50), "name": "no tensor"}
        self.line = [torch.zeros(5), None]
        self.pair = (torch.zeros(7), torch.zeros(3))
        self.elsewhere = torch.zeros(10_000, device="meta")


def test_every_tensor_that_a_module_keeps_counts() -> None:
    expected = 400 + 80 + 1000 + 200 + 20 + 28 + 12
    assert footprint.of(Hoarder(), CPU) == expected
    assert footprint.of(nn.Sequential(nn.ReLU(), nn.Sequential(Hoarder())), CPU) == expected


def test_what_several_share_counts_once_and_whole() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    network = nn.Sequential(first, second)
    network.register_buffer("corner", first.weight.detach()[:1, :1])
    assert footprint.of(network, CPU) == 8 * 8 * 4
    alone = nn.Module()
    alone.register_buffer("corner", torch.zeros(100, 100)[:1, :1])  # keeps all of it
    assert footprint.of(alone, CPU) == 40_000


def test_packed_weights_count_once_they_are_there() -> None:
    network = nn.Sequential(nn.Conv2d(32, 64, 3, bias=False), nn.ReLU()).eval().requires_grad_(requires_grad=False)
    faster = optimise(network)
    assert faster is not None
    weights = 64 * 32 * 9 * 4
    assert footprint.of(faster, CPU) == weights
    with torch.inference_mode():
        faster(torch.zeros(1, 32, 8, 8))
    assert 2 * weights <= footprint.of(faster, CPU) <= 2.5 * weights
