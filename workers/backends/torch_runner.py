"""One loaded PyTorch version on the CPU: rows in, output arrays out. Worker only.

    gather → normalise (pipeline) → network → head (pipeline, float32) → host

`stream_runner.py` does the same on a device that works beside the host. On CUDA the network runs under FP16 autocast
unless the version's precision is FP32; inputs travel as they are (images as uint8) and become floating-point numbers
on the device.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.clock import now_s
from shared.pipeline import Pipeline
from shared.tensors import DTYPES, Array
from workers.backends import footprint
from workers.backends.base import Forward, NotAsDeclared, Precision, Runner
from workers.backends.torch_device import TorchDevice
from workers.staging import HostStaging, Inputs, Padding

Network = Callable[..., Any]
"""Tensors on the device → a tensor there, or several: an `nn.Module` in evaluation mode, or what behaves like one."""


class TorchRunner(Runner):
    """See the module's docstring. `network` is ready to run on the device.

    `memory_bytes` says what it takes, if it is no module of torch's, which is counted.
    """

    def __init__(
        self,
        network: Network,
        pipeline: Pipeline[Any],
        device: TorchDevice,
        precision: Precision,
        memory_bytes: int = 0,
    ) -> None:
        self._network = network
        self._told_bytes = memory_bytes
        self._pipeline = pipeline
        self._device = device
        self._staging = HostStaging(Padding(pipeline.spec.inputs))  # a CPU needs no padding but for the longest item
        self.precision = precision
        self.pads = device.is_cuda
        self.weigh()

    def weigh(self) -> None:
        """See Runner."""
        self.memory_bytes = self._told_bytes
        if isinstance(self._network, nn.Module):
            self.memory_bytes = footprint.of(self._network, self._device.device)

    def round_up(self) -> None:
        """Pad batches to the shapes that were warmed: for a network that was compiled for each of them."""
        self._staging.padding = Padding(self._pipeline.spec.inputs, self._pipeline.warm_shapes())

    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:  # noqa: ARG002 - the port's signature
        """See `Runner.run`."""
        with self.judged(), torch.inference_mode():
            return self._run(items, precision)

    def _run(self, items: Inputs, precision: Precision) -> Forward:
        started_s = now_s()
        batch = [torch.from_numpy(rows) for rows in self._staging.gather(items)]
        copied_s = now_s()
        *outputs, finite = self.forward(batch, precision)
        arrays = self.in_spec([output.numpy() for output in outputs])
        return Forward(arrays, finite.numpy(), copied_s - started_s, now_s() - copied_s)

    def judged(self) -> contextlib.AbstractContextManager[None]:
        """See `TorchDevice.judged`."""
        return self._device.judged()

    def forward(self, batch: Sequence[Tensor], precision: Precision) -> tuple[Tensor, ...]:
        """Input tensors on the device, in the spec's order → head's outputs, and bool `[rows]`: finite. No waiting."""
        names = [spec.name for spec in self._pipeline.spec.inputs]
        inputs = dict(zip(names, batch, strict=True))
        arguments = self._pipeline.normalise(inputs)
        if precision == "fp16":
            with torch.autocast(self._device.device.type, dtype=torch.float16):
                raw = as_tuple(self._network(*arguments))
        else:
            raw = as_tuple(self._network(*arguments))
        raw = tuple(output.float() if output.dtype == torch.float16 else output for output in raw)
        outputs = tuple(self._pipeline.reduce(raw, inputs))
        self._check(outputs, len(batch[0]))
        return *outputs, _finite_rows(raw, outputs)

    def _check(self, outputs: tuple[Tensor, ...], rows: int) -> None:
        declared = self._pipeline.spec.outputs
        if len(outputs) != len(declared):
            raise NotAsDeclared(f"the model gives {len(outputs)} outputs, its pipeline declares {len(declared)}")
        for output, spec in zip(outputs, declared, strict=True):
            shape = tuple(output.shape)
            fits = len(shape) == 1 + len(spec.shape) and shape[0] == rows
            if not fits or any(want not in (-1, have) for want, have in zip(spec.shape, shape[1:], strict=True)):
                raise NotAsDeclared(
                    f"output {spec.name} has shape {list(shape)} for {rows} rows, its pipeline declares "
                    f"[rows, {', '.join(map(str, spec.shape))}]"
                )

    def in_spec(self, arrays: list[Array]) -> list[Array]:
        """The outputs in the datatypes that the pipeline declares."""
        specs = self._pipeline.spec.outputs
        return [array.astype(DTYPES[spec.datatype], copy=False) for array, spec in zip(arrays, specs, strict=True)]


def as_tuple(result: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 - whatever the user's network returns
    """A network's result as its tensors in order: one tensor, a dict or a sequence."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, dict):
        return tuple(result.values())
    return tuple(result)


def _finite_rows(raw: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Tensor:
    """Bool `[rows]`. Of the network's own numbers -inf is let through: networks use it to rule something out.

    An overflow in the network shows there as NaN or +inf, though the head's outputs may look harmless.
    """
    rows = len(outputs[0])
    finite = torch.ones(rows, dtype=torch.bool, device=outputs[0].device)
    for output in raw:
        if output.is_floating_point() and output.ndim and len(output) == rows:
            bad = torch.isnan(output) | torch.isposinf(output)
            finite &= ~bad.reshape(rows, -1).any(1)
    for output in outputs:
        if output.is_floating_point():
            finite &= torch.isfinite(output).reshape(rows, -1).all(1)
    return finite
