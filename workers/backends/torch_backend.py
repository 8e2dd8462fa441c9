"""Builds a PyTorch version: the user's factory, weights from safetensors, layout and precision. Worker only.

Weights are data: only safetensors, only after the version's hashes have been verified, never a pickle. With `trust:
code` a torch.export archive is the network itself.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shared.logs import get_logger
from shared.pipeline import Pipeline
from shared.pipeline_loader import load_object, own_code_failed
from shared.repository import ModelVersion, Repository
from workers.backends import archive, cpu_graph, examples, exported, weights
from workers.backends.base import LoadFailed, Precision, Stages, untimed
from workers.backends.stream_runner import StreamRunner
from workers.backends.torch_device import TorchDevice
from workers.backends.torch_runner import TorchRunner, as_tuple

MAX_DRIFT: dict[Precision, float] = {"fp32": 1e-3, "fp16": 2e-2}
"""How far the faster network's outputs may be from the plain one's, relative to the largest: rounding gives 1e-6 in
FP32 and, where it rounds at other places, some 1e-3 in FP16."""

_log = get_logger()


def load(
    version: ModelVersion,
    pipeline: Pipeline[Any],
    device: TorchDevice,
    precision: Precision,
    *,
    compile_for: Sequence[int] = (),
    stages: Stages = untimed,
) -> TorchRunner:
    """Verify, build, fill and place one version; `compile_for`: batch sizes for torch.compile, none by default.

    Raises LoadFailed or RepositoryError with one sentence.
    """
    with stages("read"):
        Repository.verify(version)
        name = _only_file(version)
    told = f"model {version.name}: {name}"
    with stages("build"):
        network = exported.load(version.files / name, device, told) if _is_archive(name) else _build(version)
        if not _is_archive(name):
            weights.fill(network, version.files / name, version.name)
    with stages("device"):
        if _is_archive(name):
            exported.check_rows(network, pipeline, device, told)
        else:
            network = _place(network, device)
        network = _faster(network, _Trial(pipeline, device, precision, compile_for or (2,)), version.name, compile_for)
    if device.streams is None:
        runner = TorchRunner(network, pipeline, device, precision)
        if compile_for:
            runner.round_up()
        return runner
    device.streams.settle()  # the weights have come over another queue than those that runs use
    return StreamRunner(network, pipeline, device, precision)


def plain(version: ModelVersion, device: TorchDevice, stages: Stages) -> nn.Module:
    """Verify, build, fill and place the network of a version as it is, for who runs it in a way of its own.

    Raises LoadFailed or RepositoryError with one sentence.
    """
    with stages("read"):
        Repository.verify(version)
        name = _only_file(version)
    if _is_archive(name):
        raise LoadFailed(f"model {version.name}: {name} is a torch.export archive; its pipeline needs network")
    with stages("build"):
        network = _build(version)
        weights.fill(network, version.files / name, version.name)
    with stages("device"):
        return _place(network, device)


def _only_file(version: ModelVersion) -> str:
    """The version's one file of weights. Raises LoadFailed."""
    archives = [name for name in version.meta.files if _is_archive(name)]
    names = [name for name in version.meta.files if name.endswith(weights.SUFFIX)]
    told = f"model {version.name}: version {version.version}"
    if archives and version.config.trust != "code":
        raise LoadFailed(
            f"{told} holds {archives[0]}: a torch.export archive may run code as it is loaded; "
            "set `trust: code` in model.yaml if you trust whoever made it, or serve a .safetensors or .onnx file"
        )
    if version.config.network is not None:
        if len(names) != 1 or archives:
            raise LoadFailed(f"{told} must have one .safetensors file, has {_count(names, archives)}")
        return names[0]
    if len(archives) != 1 or names:
        raise LoadFailed(
            f"{told} must have one .pt2 file, has {_count(archives, names)}; weights alone need network in model.yaml"
        )
    return archives[0]


def _count(wanted: list[str], others: list[str]) -> str:
    return f"{len(wanted)}" + (f" and {', '.join(others)[:200]}" if others else "")


def _is_archive(name: str) -> bool:
    return name.endswith(archive.SUFFIX)


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


def _place(network: nn.Module, device: TorchDevice) -> nn.Module:
    """Evaluation mode, on the device, 4-dimensional weights in channels_last order (faster on both)."""
    network = network.eval().requires_grad_(requires_grad=False).to(device.device)
    # A CPU computes in float32 whatever the file holds; on CUDA autocast makes each layer's FP16 weights as it runs,
    # and what overflows in FP16 runs again with these.
    network = network.float()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's overloads
    return network


class _Trial(NamedTuple):
    """How two networks are compared."""

    pipeline: Pipeline[Any]
    device: TorchDevice
    precision: Precision
    sizes: Sequence[int]


def _faster(network: nn.Module, trial: _Trial, name: str, compile_for: Sequence[int]) -> nn.Module:
    """A network that computes the same in less time, or the network itself."""
    if compile_for:
        faster: nn.Module | None = torch.compile(network, dynamic=False)  # type: ignore[assignment]  # a module, though typed as a callable
    else:
        faster = None if trial.device.is_cuda else cpu_graph.optimise(network)
    return network if faster is None or not _agree(network, faster, trial, name) else faster


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
        inputs = [torch.from_numpy(array).to(device) for array in examples.of(trial.pipeline, rows)]
        arguments = trial.pipeline.normalise({spec.name: tensor for spec, tensor in zip(specs, inputs, strict=True)})
        for expected, got in zip(as_tuple(plain(*arguments)), as_tuple(faster(*arguments)), strict=True):
            difference = (got - expected).abs().double().nan_to_num(nan=math.inf).max()
            drift = max(drift, float(difference) / max(float(expected.abs().max()), 1e-6))
    return drift
