"""Opens a `torch.export` archive as a network. Worker only; `archive` has looked at every entry before."""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.export.passes
from torch import nn

from shared.pipeline import Pipeline
from workers.backends import archive, examples
from workers.backends.base import LoadFailed
from workers.backends.torch_device import TorchDevice

_SIZES = (1, 2)
"""Batches that tell whether the number of rows is free: an export fixes it at the example's."""


def load(path: Path, device: TorchDevice, told: str) -> nn.Module:
    """The network, on the device; its datatypes are part of its graph, and stay. Raises LoadFailed."""
    archive.check(path, told)
    _check_sample_inputs(path, told)
    try:
        program = torch.export.load(path)
        if device.is_cuda:  # also what the graph itself makes, which no parameter tells
            program = torch.export.passes.move_to_device_pass(program, device.device)
        # Without its guards, which are source text: the checks of its input sizes stay.
        network = program.module(check_guards=False)
    except Exception as error:  # torch's reader raises whatever it meets
        raise LoadFailed(
            f"{told}: torch can't open it ({type(error).__name__}, see the log)", str(error)[:300]
        ) from error
    return network.requires_grad_(requires_grad=False)


def check_rows(network: nn.Module, pipeline: Pipeline[Any], device: TorchDevice, told: str) -> None:
    """Run a batch of each size. Raises LoadFailed when one of them does not go through."""
    failed = [(size, error) for size in _SIZES if (error := _try(network, pipeline, device, size)) is not None]
    if not failed:
        return
    size, error = failed[0]
    if len(failed) == 1:
        raise LoadFailed(
            f"{told}: runs batches of {_SIZES[0] + _SIZES[1] - size} row(s), and none of {size}: export it with a "
            'dynamic first dimension, dynamic_shapes=({0: torch.export.Dim("rows")}, …)'
        ) from error
    raise LoadFailed(
        f"{told}: can't run what the pipeline makes ({type(error).__name__}, see the log)", str(error)[:300]
    ) from error


def _try(network: nn.Module, pipeline: Pipeline[Any], device: TorchDevice, size: int) -> Exception | None:
    specs = pipeline.spec.inputs
    with torch.inference_mode():
        inputs = [torch.from_numpy(array).to(device.device) for array in examples.of(pipeline, size)]
        arguments: Sequence[Any] = pipeline.normalise({s.name: each for s, each in zip(specs, inputs, strict=True)})
        try:
            network(*arguments)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            return error
    return None


def _check_sample_inputs(path: Path, told: str) -> None:
    """The one pickle of a plain archive: torch would open it without limits where it can't with them."""
    with zipfile.ZipFile(path) as file:
        for info in file.infolist():
            if info.filename.endswith(f"/{archive.SAMPLE_INPUTS}"):
                if info.file_size > archive.MAX_GRAPH_BYTES:
                    raise LoadFailed(f"{told}: its example inputs are larger than {archive.MAX_GRAPH_BYTES} bytes")
                try:
                    torch.load(io.BytesIO(file.read(info)), weights_only=True)
                except Exception:  # noqa: BLE001 - a pickle raises whatever it likes
                    raise LoadFailed(
                        f"{told}: its example inputs are no plain tensors: export it with tensors"
                    ) from None
