"""Makes a network faster on a CPU without changing what it computes. Worker only.

Plain eager PyTorch runs a convolution, its batch norm and its activation as three passes over memory, and brings the
convolution's weights into oneDNN's layout anew in every call. Here the network is traced once; then each convolution
absorbs the batch norm behind it (folded into its weights), the activation behind that (done by oneDNN as it writes)
and a `pad_same` before it, and keeps its weights in oneDNN's layout. Measured in docs/benchmarks/cpu_forward.md.

A network that can't be traced (control flow that depends on values) or has nothing to absorb runs as it is. The caller
compares the results of both on an example before it uses the new one.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from workers.padding import pad_same, same_padding


class Activation(NamedTuple):
    """How oneDNN calls an activation, and with which numbers."""

    name: str
    scalars: tuple[float, ...] = ()


_NONE = Activation("none")
_RELU = Activation("relu")
_RELU6 = Activation("hardtanh", (0.0, 6.0))
_SILU = Activation("swish")

_BY_MODULE: dict[type[nn.Module], Activation] = {nn.ReLU: _RELU, nn.ReLU6: _RELU6, nn.SiLU: _SILU}
_BY_FUNCTION: dict[Any, Activation] = {
    functional.relu: _RELU,
    torch.relu: _RELU,
    functional.relu6: _RELU6,
    functional.silu: _SILU,
}


class _Form(NamedTuple):
    """One way to run the convolution: extra zero rows and columns before the kernel, and symmetric padding."""

    extra: tuple[int, int]
    padding: tuple[int, int]


class FusedConvolution(nn.Module):
    """Convolution, folded batch norm and activation in one call. Float32, `[rows, channels, height, width]`, CPU.

    oneDNN as PyTorch offers it pads symmetrically. Padding (t, t + 1) is therefore done with padding t + 1 and a kernel
    that got one row of zeros in front: the same sums, without a padded copy of the input.

    The weights are packed at the first call, for the layout oneDNN prefers at that image size; warm-up makes that call.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, convolution: nn.Conv2d, norm: nn.BatchNorm2d | None, *, same: bool) -> None:
        """`same`: the input is to be padded as `pad_same` does, instead of by the convolution's own padding."""
        super().__init__()
        weight, bias = convolution.weight, convolution.bias
        if norm is not None and norm.running_mean is not None and norm.running_var is not None:
            weight, bias = fuse_conv_bn_weights(
                weight, bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            )
        self.register_buffer("weight", weight.detach().contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.stride, self.groups = convolution.stride, convolution.groups
        self.dilation, self.padding = convolution.dilation, cast("tuple[int, int]", convolution.padding)
        self.same = same
        self.activation = _NONE
        self._packed: dict[_Form, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, channels_in, height, width]` → `[rows, channels_out, …]`, activated."""
        form = self._form(x) if self.same else _Form((0, 0), self.padding)
        weight = self._packed.get(form)
        if weight is None:
            weight = self._packed[form] = self._pack(form, x)
        return cast(
            "Tensor",
            torch.ops.mkldnn._convolution_pointwise(  # noqa: SLF001 - the operator that torch.compile uses; checked by `supported`
                x,
                weight,
                self.bias,
                form.padding,
                self.stride,
                self.dilation,
                self.groups,
                self.activation.name,
                self.activation.scalars,
                "",
            ),
        )

    def _form(self, x: Tensor) -> _Form:
        kernel = self.weight.shape[-2:]
        top, bottom = same_padding(x.shape[-2], kernel[0], self.stride[0])
        left, right = same_padding(x.shape[-1], kernel[1], self.stride[1])
        return _Form((bottom - top, right - left), (bottom, right))

    def _pack(self, form: _Form, x: Tensor) -> Tensor:
        weight = self.weight
        if any(form.extra):
            weight = functional.pad(weight, (form.extra[1], 0, form.extra[0], 0))
            weight = weight.contiguous(memory_format=torch.channels_last)
        return cast(
            "Tensor",
            torch.ops.mkldnn._reorder_convolution_weight(  # noqa: SLF001 - as above
                weight, form.padding, self.stride, self.dilation, self.groups, list(x.shape)
            ),
        )


class _OwnThread(torch.fx.Tracer):
    """Traces the calls of the thread that made it, and of no other.

    While PyTorch traces, each call of any `nn.Module` in the process, and each look at an attribute of one, comes by
    the tracer: those of the networks that answer in other threads, too, which fail by it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - as torch has it
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:  # noqa: ANN401 - as torch has it
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def supported() -> bool:
    """Whether this build of PyTorch has the two oneDNN operators."""
    return torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]  # torch annotates it not
        hasattr(torch.ops.mkldnn, name) for name in ("_convolution_pointwise", "_reorder_convolution_weight")
    )


def optimise(network: nn.Module) -> nn.Module | None:
    """A faster network with the same weights, or None when there is nothing to gain. `network` stays as it is.

    The network must be in evaluation mode, float32, on the CPU.
    """
    if not supported():
        return None
    try:
        graph = torch.fx.GraphModule(network, _OwnThread().trace(network), type(network).__name__)
    except Exception:  # noqa: BLE001 - the network is the user's own code: whatever stops the trace, eager still runs it
        return None
    found = [node for node in graph.graph.nodes if _fusable(graph, node)]
    for number, node in enumerate(found):
        _absorb(graph, node, f"fused_{number}")
    if not found:
        return None
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph.eval()


def _module_of(graph: torch.fx.GraphModule, node: torch.fx.Node) -> nn.Module | None:
    return graph.get_submodule(cast("str", node.target)) if node.op == "call_module" else None


def _fusable(graph: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    module = _module_of(graph, node)
    return (
        type(module) is nn.Conv2d
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and module.weight.dtype == torch.float32
        and len(node.args) == 1
        and not node.kwargs
    )


def _only_user(node: torch.fx.Node) -> torch.fx.Node | None:
    """The one step that takes this step's result as its first argument; None when there are several or none."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.args and user.args[0] is node else None


def _absorb(graph: torch.fx.GraphModule, node: torch.fx.Node, name: str) -> None:
    convolution = cast("nn.Conv2d", _module_of(graph, node))
    source = cast("torch.fx.Node", node.args[0])
    same = _is_same_padding(source, convolution)
    last = node
    norm = _norm_behind(graph, node)
    if norm is not None:
        last = cast("torch.fx.Node", _only_user(node))
    fused = FusedConvolution(convolution, norm, same=same)
    activation = _activation_behind(graph, last)
    if activation is not None:
        fused.activation = activation
        last = cast("torch.fx.Node", _only_user(last))
    graph.add_submodule(name, fused)
    with graph.graph.inserting_before(node):
        replacement = graph.graph.call_module(name, (source.args[0] if same else source,))
    last.replace_all_uses_with(replacement)


def _is_same_padding(source: torch.fx.Node, convolution: nn.Conv2d) -> bool:
    """Whether the convolution's input comes from a `pad_same` made for it and for nothing else."""
    square = convolution.kernel_size[0] == convolution.kernel_size[1] and convolution.stride[0] == convolution.stride[1]
    expected = (convolution.kernel_size[0], convolution.stride[0])
    return (
        source.op == "call_function"
        and source.target is pad_same
        and len(source.users) == 1
        and not source.kwargs
        and square
        and source.args[1:] == expected
        and convolution.padding == (0, 0)
        and convolution.dilation == (1, 1)
    )


def _norm_behind(graph: torch.fx.GraphModule, node: torch.fx.Node) -> nn.BatchNorm2d | None:
    user = _only_user(node)
    module = None if user is None else _module_of(graph, user)
    if type(module) is nn.BatchNorm2d and not module.training and module.running_var is not None:
        return module
    return None


def _activation_behind(graph: torch.fx.GraphModule, node: torch.fx.Node) -> Activation | None:
    user = _only_user(node)
    if user is None:
        return None
    if user.op == "call_function" and len(user.args) == 1:
        # `inplace=` changes nothing here: the result it would overwrite is used by nobody else.
        target: Callable[..., Any] = cast("Callable[..., Any]", user.target)
        return _BY_FUNCTION.get(target) if set(user.kwargs) <= {"inplace"} else None
    module = _module_of(graph, user)
    return None if module is None else _BY_MODULE.get(type(module))
