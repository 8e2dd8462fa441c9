"""Runs an ONNX file with onnxruntime, between the pipeline's own torch hooks. Worker only.

    gather → normalise (torch) → onnxruntime → head (torch, float32) → host

Tensors pass between the two by address on the device that both use; nothing is copied for that, but for an input that
does not lie in memory row by row. On CUDA, onnxruntime queues its work on the very stream on which the hooks run.
"""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shared import onnx_check
from shared.logs import get_logger
from shared.model_config import OnnxConfig
from shared.pipeline import Pipeline
from shared.repository import ModelVersion, Repository
from shared.tensors import DTYPES, Array
from workers.backends.base import LoadFailed, OutOfMemory, Stages, untimed
from workers.backends.onnx_fit import DTYPES as TORCH_DTYPES
from workers.backends.onnx_fit import Fit, fit
from workers.backends.outliers import Outliers
from workers.backends.stream_runner import StreamRunner
from workers.backends.torch_device import CudaDevice, TorchDevice
from workers.backends.torch_runner import TorchRunner

_OUT_OF_MEMORY = ("failed to allocate memory", "out of memory", "bad allocation", "bad_alloc", "cudaerrormemory")
"""What onnxruntime's messages say, in lower case, when an arena or the device has no room."""

_log = get_logger()


class OnnxNetwork:
    """Tensors on the device → the network's outputs there, in the order of `Fit`. Used by one thread at a time."""

    def __init__(self, runtime: ModuleType, session: Any, parts: Fit, device: torch.device) -> None:  # noqa: ANN401 - onnxruntime has no types
        self._runtime = runtime
        self._session = session
        self._parts = parts
        self._place = (device.type, device.index or 0)
        self._outliers = Outliers()
        self.shrunk = 0
        """Passes after which memory was given back."""

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """One pass. Raises OutOfMemory, or what onnxruntime raises."""
        binding = self._session.io_binding()
        # Named, so that they live until the pass is over: the binding holds addresses only.
        inputs = [_as_wanted(*pair) for pair in zip(arguments, self._parts.inputs, strict=True)]
        for tensor, wanted in zip(inputs, self._parts.inputs, strict=True):
            kind = DTYPES[wanted.datatype].type
            binding.bind_input(wanted.name, *self._place, kind, tuple(tensor.shape), tensor.data_ptr())
        for output in self._parts.outputs:
            binding.bind_output(output.name, *self._place)
        try:
            self._session.run_with_iobinding(binding, self._options(inputs))
        except Exception as error:
            if any(words in str(error).lower() for words in _OUT_OF_MEMORY):
                raise OutOfMemory(str(error)[:300]) from error
            raise
        pairs = zip(binding.get_outputs(), self._parts.outputs, strict=True)
        return tuple(_as_tensor(value, output.datatype) for value, output in pairs)

    def _options(self, inputs: Sequence[Tensor]) -> Any:  # noqa: ANN401 - as above
        options = self._runtime.RunOptions()
        if self._outliers.saw(sum(tensor.nbytes for tensor in inputs)):
            kind, index = self._place
            options.add_run_config_entry(
                "memory.enable_memory_arena_shrinkage", f"{'gpu' if kind == 'cuda' else kind}:{index}"
            )
            self.shrunk += 1
        return options


class OnnxStreamRunner(StreamRunner):
    """On a device with streams. Copies of the next rows run beside a pass; the host waits inside it for onnxruntime."""

    def prepare(self, rows: Sequence[Array], sizes: Sequence[int]) -> Sequence[int]:  # noqa: ARG002 - no graphs here
        """No CUDA graphs: onnxruntime takes memory while it runs."""
        return ()


def load(
    version: ModelVersion,
    pipeline: Pipeline[Any],
    device: TorchDevice,
    *,
    max_rows: int,
    stages: Stages = untimed,
) -> TorchRunner:
    """Verify, check and open one version; `max_rows` of a batch.

    Raises LoadFailed or RepositoryError with one sentence.
    """
    runtime = _runtime(version.name)
    with stages("read"):
        Repository.verify(version)
        name = _only_file(version)
        told = f"model {version.name}: {name}"
        file = onnx_check.check(version.files / name, version.meta.files, told)
        parts = fit(file, pipeline, max_rows, told)
    with stages("build"):
        before = device.taken_without_torch()
        session = _session(runtime, version, name, device)
        on_disk = sum((version.files / each).stat().st_size for each in (name, *file.external))
        # onnxruntime does not tell what it takes. At least its weights: packed, it gives up the ones that it has read.
        # Others who use the device, or another ONNX model's batch, may make it more, but never less than that.
        memory_bytes = max(device.taken_without_torch() - before, on_disk)
    network = OnnxNetwork(runtime, session, parts, device.device)
    if device.streams is None:
        return TorchRunner(network, pipeline, device, "fp32", memory_bytes)
    return OnnxStreamRunner(network, pipeline, device, "fp32", memory_bytes)


def _runtime(name: str) -> ModuleType:
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise LoadFailed(
            f"model {name}: backend onnxruntime is not installed: pip install 'headrace[onnx]'", str(error)[:200]
        ) from None


def _only_file(version: ModelVersion) -> str:
    names = [name for name in version.meta.files if name.endswith(onnx_check.SUFFIX)]
    if len(names) != 1 or "/" in names[0]:
        raise LoadFailed(
            f"model {version.name}: version {version.version} must have one .onnx file, in no folder; has {len(names)}"
        )
    return names[0]


def _session(runtime: ModuleType, version: ModelVersion, name: str, device: TorchDevice) -> Any:  # noqa: ANN401 - as above
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = 3  # errors; they are raised, too
    # Waiting threads sleep: gateway and pool need the cores between two passes.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Whatever its name or first bytes say, the file is read as what has been checked.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    try:
        providers = _providers(version.config.onnx, device, runtime.get_available_providers(), version.name)
        session = runtime.InferenceSession(str(version.files / name), options, providers=providers)
    except LoadFailed:
        raise
    except Exception as error:  # its classes have no common base of their own
        # Its words name files by their whole path: they are for the log.
        _log.error("onnxruntime can't load a model", model=version.name, reason=str(error)[:1000])
        kind = type(error).__name__
        raise LoadFailed(f"model {version.name}: onnxruntime can't load {name} ({kind}, see the log)") from error
    _check_provider(session.get_providers(), device, version.name)
    return session


def _providers(config: OnnxConfig, device: TorchDevice, available: Sequence[str], name: str) -> list[Any]:
    """CUDA, then the CPU for what has no kernel there; only the CPU where the worker's device is one."""
    cpu = ["CPUExecutionProvider"]
    if not isinstance(device, CudaDevice):
        return cpu
    _check_provider(available, device, name)
    return [("CUDAExecutionProvider", cuda_options(config, device)), *cpu]


def cuda_options(config: OnnxConfig, device: CudaDevice) -> Mapping[str, str]:
    """The CUDA provider's options, as it wants them: all text."""
    options = {
        "device_id": str(device.device.index or 0),
        "arena_extend_strategy": config.arena_extend_strategy,
        # One order for the pipeline's hooks and the network, without waiting in between.
        "user_compute_stream": str(device.streams.computing_handle),
    }
    if config.gpu_mem_limit_bytes is not None:
        options["gpu_mem_limit"] = str(config.gpu_mem_limit_bytes)
    return options


def _check_provider(providers: Sequence[str], device: TorchDevice, name: str) -> None:
    """A model that quietly runs on the CPU instead is an outage that nobody sees."""
    if device.is_cuda and "CUDAExecutionProvider" not in providers:
        raise LoadFailed(
            f"model {name}: this worker runs on {device.name}, where the installed onnxruntime can't: "
            "pip install onnxruntime-gpu in its place, or set worker.device to cpu"
        )


def _as_wanted(argument: Tensor, wanted: onnx_check.OnnxTensor) -> Tensor:
    return argument.to(TORCH_DTYPES[wanted.datatype]).contiguous()


def _as_tensor(value: Any, datatype: str) -> Tensor:  # noqa: ANN401 - an OrtValue
    """The same memory as a tensor; booleans travel as bytes."""
    tensor = torch.utils.dlpack.from_dlpack(value)
    return tensor.view(torch.bool) if datatype == "BOOL" else tensor
