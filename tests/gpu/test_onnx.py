from pathlib import Path

import numpy as np
import pytest
import torch

from shared.errors import StartupError
from shared.settings import BatchingSettings, Settings
from tests.support.onnx_parts import ONNX_YAML, WEIGHT, WIDTH, model
from tests.support.worker_parts import toy_model
from workers.backends import torch_device
from workers.backends.onnx_backend import OnnxStreamRunner
from workers.loading import Loader
from workers.model_pool import Key

onnxruntime = pytest.importorskip("onnxruntime")
HAS_CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def loader(root: Path) -> Loader:
    settings = Settings(repository=root, batching=BatchingSettings(max_rows=4, sizes=(1, 2, 4)))
    return Loader(settings, torch_device.find("cuda", 0, 1))


@pytest.mark.skipif(not HAS_CUDA, reason="needs onnxruntime-gpu")
def test_passes_in_both_lanes_compute_what_the_file_says(tmp_path: Path) -> None:
    yaml = ONNX_YAML + "onnx: {gpu_mem_limit_bytes: 1073741824}\n"
    version = toy_model(tmp_path, "toy", yaml, {"m.onnx": model().SerializeToString()})
    loaded = loader(tmp_path).load(Key("toy", version.version))
    assert isinstance(loaded.runner, OnnxStreamRunner)
    random = np.random.default_rng(0)
    for _ in range(50):
        rows = random.random((2, 4, WIDTH), np.float32)
        passes = [loaded.runner.start([[rows[lane]]], 4, loaded.precision, lane) for lane in (0, 1)]
        for lane, under_way in enumerate(passes):
            np.testing.assert_allclose(under_way.wait().outputs[0], rows[lane] @ WEIGHT, rtol=1e-2)
    torch.cuda.synchronize()


@pytest.mark.skipif(HAS_CUDA, reason="this onnxruntime can use the device")
def test_a_runtime_without_cuda_is_refused_rather_than_slow(tmp_path: Path) -> None:
    version = toy_model(tmp_path, "toy", ONNX_YAML, {"m.onnx": model().SerializeToString()})
    with pytest.raises(StartupError, match="pip install onnxruntime-gpu in its place"):
        loader(tmp_path).load(Key("toy", version.version))
