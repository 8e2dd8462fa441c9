"""Builds a PyTorch version: the user's factory, weights from safetensors, layout and precision. Worker only.

Weights are data: only safetensors, only after the version's hashes have been verified, never a pickle.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from shared.logs import get_logger
from shared.pipeline import Pipeline
from shared.pipeline_loader import load_object, own_code_failed
from shared.repository import ModelVersion, Repository
from workers.backends import cpu_graph, examples
from workers.backends.base import LoadFailed, Precision
from workers.backends.stream_runner import StreamRunner
from workers.backends.torch_device import TorchDevice
from workers.backends.torch_runner import TorchRunner, as_tuple

MAX_DRIFT: dict[Precision, float] = {"fp32": 1e-3, "fp16": 2e-2}
"""How far the faster network's outputs may be from the plain one's, relative to the largest: rounding gives 1e-6 in
FP32 and, where it rounds at other places, some 1e-3 in FP16."""
_SHOWN_KEYS = 3
"""Names of wrong weights in a message; the rest is a number."""

_log = get_logger()


def load(
    version: ModelVersion,
    pipeline: Pipeline[Any],
    device: TorchDevice,
    precision: Precision,
    *,
    compile_for: Sequence[int] = (),
) -> TorchRunner:
    """Verify, build, fill and place one version; `compile_for`: batch sizes for torch.compile, none by default.

    Raises LoadFailed or RepositoryError with one sentence.
    """
    Repository.verify(version)
    before = device.memory_in_use()
    network = _build(version)
    _fill(network, read_weights(version), version.name)
    network = _place(network, device)
    memory_bytes = device.memory_in_use() - before or _size_of(network)
    faster = _compile(network) if compile_for else _optimise(network, device)
    if faster is not None:
        trial = _Trial(pipeline, device, precision, compile_for or (2,))
        network = faster if _agree(network, faster, trial, version.name) else network
    if device.streams is None:
        return TorchRunner(network, pipeline, device, precision, memory_bytes)
    device.streams.settle()  # the weights have come over another queue than those that runs use
    return StreamRunner(network, pipeline, device, precision, memory_bytes)


def read_weights(version: ModelVersion) -> dict[str, Tensor]:
    """The version's one `.safetensors` file. Raises LoadFailed."""
    names = [name for name in version.meta.files if name.endswith(".safetensors")]
    if len(names) != 1:
        raise LoadFailed(
            f"model {version.name}: version {version.version} must have one .safetensors file, has {len(names)}"
        )
    return _read(version.files / names[0], f"model {version.name}: {names[0]}")


def _read(path: Path, told: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise LoadFailed(f"{told} can't be read as safetensors: {str(error)[:200]}") from None
    except OSError as error:
        raise LoadFailed(f"{told} can't be read ({type(error).__name__}, see the log)", str(error)[:200]) from None


def _build(version: ModelVersion) -> nn.Module:
    reference = version.config.network or ""
    factory: Callable[[], object] = load_object(reference, version.folder, version.name)
    try:
        network = factory()
    except Exception as error:  # the factory is the user's own code
        raise own_code_failed(f"model {version.name}: {reference}() failed", error) from error
    if not isinstance(network, nn.Module):
        raise LoadFailed(f"model {version.name}: {reference}() gives {type(network).__name__}, not a torch.nn.Module")
    return network


def _fill(network: nn.Module, weights: dict[str, Tensor], name: str) -> None:
    """Copy the weights into the network; keys and shapes must match exactly."""
    own = network.state_dict()
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown:
        parts = [f"lack {_some(missing)}" if missing else "", f"hold {_some(unknown)} too much" if unknown else ""]
        raise LoadFailed(f"model {name}: the weights {' and '.join(filter(None, parts))}: not this network's weights")
    wrong = [key for key in sorted(own) if own[key].shape != weights[key].shape]
    if wrong:
        key = wrong[0]
        raise LoadFailed(
            f"model {name}: weight {key} has shape {list(weights[key].shape)}, the network wants "
            f"{list(own[key].shape)} ({len(wrong)} of {len(own)} differ)"
        )
    network.load_state_dict(weights)


def _some(keys: list[str]) -> str:
    shown = ", ".join(keys[:_SHOWN_KEYS])
    return shown if len(keys) <= _SHOWN_KEYS else f"{shown} and {len(keys) - _SHOWN_KEYS} more"


def _place(network: nn.Module, device: TorchDevice) -> nn.Module:
    """Evaluation mode, on the device, 4-dimensional weights in channels_last order (faster on both)."""
    network = network.eval().requires_grad_(requires_grad=False).to(device.device)
    # A CPU computes in float32 whatever the file holds; on CUDA autocast makes each layer's FP16 weights as it runs,
    # and what overflows in FP16 runs again with these.
    network = network.float()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's overloads
    return network


def _size_of(network: nn.Module) -> int:
    tensors = [*network.parameters(), *network.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def _optimise(network: nn.Module, device: TorchDevice) -> nn.Module | None:
    return None if device.is_cuda else cpu_graph.optimise(network)


def _compile(network: nn.Module) -> nn.Module:
    return torch.compile(network, dynamic=False)  # type: ignore[return-value]  # a module, though typed as a callable


class _Trial(NamedTuple):
    """How two networks are compared."""

    pipeline: Pipeline[Any]
    device: TorchDevice
    precision: Precision
    sizes: Sequence[int]


def _agree(plain: nn.Module, faster: nn.Module, trial: _Trial, name: str) -> bool:
    """Whether the faster network computes the same on examples. Whatever it raises counts as no."""
    limit = MAX_DRIFT[trial.precision]
    try:
        drift = max(_drift(plain, faster, trial, size) for size in trial.sizes)
    except Exception as error:  # noqa: BLE001 - the plain network is there: speed is not worth a failed start
        _log.warning("the faster network failed", model=name, error=f"{type(error).__name__}: {str(error)[:300]}")
        return False
    if drift > limit:
        _log.warning("the faster network differs", model=name, relative_difference=drift, limit=limit)
    return drift <= limit


def _drift(plain: nn.Module, faster: nn.Module, trial: _Trial, rows: int) -> float:
    """Largest difference of two networks' outputs, relative to the largest output; NaN counts as infinite."""
    specs, device = trial.pipeline.spec.inputs, trial.device.device
    drift = 0.0
    with torch.inference_mode(), torch.autocast(device.type, torch.float16, enabled=trial.precision == "fp16"):
        inputs = [torch.from_numpy(array).to(device) for array in examples.rows(specs, rows)]
        arguments = trial.pipeline.normalise({spec.name: tensor for spec, tensor in zip(specs, inputs, strict=True)})
        for expected, got in zip(as_tuple(plain(*arguments)), as_tuple(faster(*arguments)), strict=True):
            difference = (got - expected).abs().double().nan_to_num(nan=math.inf).max()
            drift = max(drift, float(difference) / max(float(expected.abs().max()), 1e-6))
    return drift
