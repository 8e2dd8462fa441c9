import threading
from collections.abc import Callable

import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from workers.backends.cpu_graph import FusedConvolution, optimise, supported
from workers.networks.efficientnet_lite import Block
from workers.padding import pad_same

torch.fx.wrap("pad_same")

pytestmark = pytest.mark.skipif(not supported(), reason="this build of PyTorch has no oneDNN operators")


class Padded(nn.Module):
    """pad_same → convolution → norm → ReLU6, and a second user of the result."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, kernel, stride, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.kernel, self.stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu6(self.norm(self.convolution(pad_same(x, self.kernel, self.stride))))
        return y + y.mean()


class Branching(nn.Module):
    """Can't be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class SharedInput(nn.Module):
    """Nothing behind the convolution belongs to it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        return self.norm(y) + y


def trained(network: nn.Module) -> nn.Module:
    """Norms as after training, not the neutral ones of a fresh network."""
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor, 0.5, 0.5, generator)  # type: ignore[arg-type]  # none is None here
            nn.init.uniform_(module.running_var, 0.5, 2.0, generator)  # type: ignore[arg-type]  # as above
    return network.eval().requires_grad_(requires_grad=False)


def assert_same(network: nn.Module, x: Tensor) -> nn.Module:
    faster = optimise(network)
    assert faster is not None
    with torch.inference_mode():
        for _ in range(2):  # packs its weights in the first call
            torch.testing.assert_close(faster(x), network(x), rtol=1e-4, atol=1e-5)
    return faster


def fused(network: nn.Module) -> list[FusedConvolution]:
    return [module for module in network.modules() if isinstance(module, FusedConvolution)]


@settings(deadline=None, max_examples=15)
@given(
    st.integers(5, 17), st.integers(5, 17), st.sampled_from([1, 3, 5]), st.sampled_from([1, 2, 3]), st.integers(1, 3)
)
def test_padding_norm_and_activation_are_absorbed_at_every_size(
    h: int, w: int, kernel: int, stride: int, n: int
) -> None:
    faster = assert_same(
        trained(Padded(kernel, stride)), torch.randn(n, 3, h, w, generator=torch.Generator().manual_seed(h))
    )
    assert [module.same for module in fused(faster)] == [True]


def test_one_network_serves_odd_and_even_images() -> None:
    network = trained(Padded(3, 2))
    faster = optimise(network)
    assert faster is not None
    with torch.inference_mode():
        for size in (8, 9, 8, 12, 9):
            x = torch.randn(2, 3, size, size)
            torch.testing.assert_close(faster(x), network(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "activation", [nn.ReLU, lambda: nn.ReLU(inplace=True), nn.ReLU6, nn.SiLU, nn.GELU, nn.Identity]
)
@pytest.mark.parametrize("groups", [1, 4])
def test_activations(activation: Callable[[], nn.Module], groups: int) -> None:
    network = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=groups), nn.BatchNorm2d(8), activation(), nn.Conv2d(8, 4, 1)
    )
    assert len(fused(assert_same(trained(network), torch.randn(2, 4, 6, 6)))) == 2


def test_a_block_with_a_residual_keeps_it() -> None:
    assert len(fused(assert_same(trained(Block(8, 8, 5, 1, 6)), torch.randn(2, 8, 7, 7)))) == 3


def test_what_others_use_too_is_not_absorbed() -> None:
    assert_same(trained(SharedInput()), torch.randn(2, 3, 4, 4))


def test_the_original_is_left_alone() -> None:
    network = trained(Padded(3, 2))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    optimise(network)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    "network",
    [
        Branching(),
        nn.Linear(3, 3),
        nn.Conv2d(3, 3, 3, padding="same"),
        nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
    ],
)
def test_networks_with_nothing_to_gain_are_left_as_they_are(network: nn.Module) -> None:
    assert optimise(network.eval()) is None


class Meanwhile(nn.Module):
    """Does something in another thread while it is called."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self._do = do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=self._do)
        thread.start()
        thread.join()
        return self.inner(x)


def test_other_networks_answer_while_one_is_traced() -> None:
    serving, x = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU())), torch.randn(2, 3, 8, 8)
    expected = serving(x)
    answers: list[torch.Tensor] = []

    def answer() -> None:
        with torch.inference_mode():
            answers.append(serving(x))

    loading = Meanwhile(answer).eval()
    assert len(fused(optimise(loading))) == 1
    assert len(answers) == 1, "while it was traced"
    torch.testing.assert_close(answers[0], expected)
