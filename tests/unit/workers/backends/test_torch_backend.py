import inspect
import pickle
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from shared.errors import StartupError
from shared.pipeline import PipelineSpec
from shared.settings import BatchingSettings, Settings, WorkerSettings
from shared.tensors import TensorSpec
from tests.support.fake_streams import FakeDevice, FakeStreams
from tests.support.worker_parts import ToyPipeline, toy_model
from workers.backends import torch_device
from workers.backends.base import NotAsDeclared, OutOfMemory
from workers.backends.stream_runner import StreamRunner
from workers.backends.torch_device import TorchDevice
from workers.backends.torch_runner import TorchRunner
from workers.loading import Loader, needs_torch, served
from workers.model_pool import Key

CPU = TorchDevice(torch.device("cpu"))
MODEL_YAML = "pipeline: toy:Toy\nbackend: torch\nnetwork: mine:network\n"
CODE = """
import torch
from torch import nn


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def failing():
    raise RuntimeError("no such layer")


def nothing():
    return 3


def narrow():
    return nn.Linear(4, 3)
"""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def wide() -> nn.Sequential:
    first = (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2000, 2), nn.BatchNorm2d(2000))
    return nn.Sequential(*first, nn.Conv2d(2000, 1000, 1), nn.Flatten(1), nn.Linear(1000, 4))


def weights(module: nn.Module) -> bytes:
    return safetensors.torch.save(module.state_dict())


def load(root: Path, files: dict[str, bytes], model_yaml: str = MODEL_YAML) -> str:
    """The sentence with which the load fails."""
    version = toy_model(root, "toy", model_yaml, files, CODE)
    with pytest.raises(StartupError) as caught:
        loader(root).load(Key("toy", version.version))
    assert str(root) not in caught.value.text
    assert "\n" not in caught.value.text
    return caught.value.text


def loader(root: Path, **worker: object) -> Loader:
    batching = BatchingSettings(max_rows=4, sizes=(1, 2, 4))
    return Loader(Settings(repository=root, batching=batching, worker=worker), CPU)  # type: ignore[arg-type]  # pydantic makes the group


def test_the_users_network_from_the_models_folder_computes_what_it_should(tmp_path: Path) -> None:
    module = network()
    toy_model(tmp_path, "toy", MODEL_YAML, {"weights.safetensors": weights(module)}, CODE)
    ((key, _),) = served(Settings(repository=tmp_path))
    loaded = loader(tmp_path).load(key)
    assert [size for size, _ in loaded.batch_s] == [1, 2, 4]
    assert loaded.precision == "fp32"
    assert loaded.runner.memory_bytes == sum(tensor.nbytes for tensor in module.state_dict().values())
    rows = np.random.default_rng(0).random((3, 4), np.float32)
    forward = loaded.runner.run([[rows[:1]], [rows[1:]]], 4, "fp32")
    np.testing.assert_allclose(forward.outputs[0], module(torch.from_numpy(rows)).detach(), rtol=1e-5)
    assert forward.finite.tolist() == [True] * 3


def test_packed_weights_are_in_what_a_version_is_measured_at(tmp_path: Path) -> None:
    """The network keeps its weights, and oneDNN's copy of them beside."""
    module = wide()
    code = "from torch import nn\n\n\n" + inspect.getsource(wide)
    files = {"w.safetensors": weights(module)}
    version = toy_model(tmp_path, "toy", MODEL_YAML.replace("mine:network", "mine:wide"), files, code)
    loaded = loader(tmp_path).load(Key("toy", version.version))
    packed = 2000 * 1000 * 4
    own = sum(parameter.nbytes for parameter in module.parameters())
    assert own + packed <= loaded.memory_bytes <= 1.2 * (own + packed)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("mine:failing", "mine:failing() failed (RuntimeError, see the log)"),
        ("mine:nothing", "gives int, not a torch.nn.Module"),
        ("mine:networ", "network"),
        ("absent:network", "absent"),
    ],
)
def test_a_bad_factory_is_named(tmp_path: Path, factory: str, words: str) -> None:
    text = load(tmp_path, {"w.safetensors": weights(network())}, MODEL_YAML.replace("mine:network", factory))
    assert "toy" in text
    assert words in text


def test_weights_of_another_network_are_named_in_one_sentence(tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4))
    assert "weight 0.bias has shape [9], the network wants [8] (3 of 4 differ)" in load(
        tmp_path / "shapes", {"w.safetensors": weights(other)}
    )
    text = load(tmp_path / "keys", {"w.safetensors": weights(nn.Linear(4, 8))})
    assert "lack 0.bias, 0.weight, 2.bias and 1 more and hold bias, weight too much" in text


def test_a_version_must_hold_exactly_one_weights_file(tmp_path: Path) -> None:
    assert "must have one .safetensors file, has 0" in load(tmp_path / "none", {"weights.pth": b"x"})
    two = {"a.safetensors": weights(network()), "b.safetensors": weights(network())}
    assert "has 2" in load(tmp_path / "two", two)


def test_a_changed_byte_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    version = toy_model(tmp_path, "toy", MODEL_YAML, {"w.safetensors": weights(network())}, CODE)
    path = version.files / "w.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"w\.safetensors: has changed"):
        loader(tmp_path).load(Key("toy", version.version))


class Canary:
    """Its unpickling would leave a mark."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


def test_no_pickle_is_ever_opened(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = pickle.dumps(Canary(mark))
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", evil)
    for number, content in enumerate((evil, archive.getvalue(), b"")):
        text = load(tmp_path / str(number), {"weights.safetensors": content})
        assert "can't be read as safetensors" in text
    assert not mark.exists()


def test_outputs_that_are_not_what_the_pipeline_declares_fail_the_load(tmp_path: Path) -> None:
    version = toy_model(
        tmp_path,
        "toy",
        MODEL_YAML.replace("mine:network", "mine:narrow"),
        {"w.safetensors": weights(nn.Linear(4, 3))},
        CODE,
    )
    with pytest.raises(
        NotAsDeclared, match=r"output y has shape \[1, 3\] for 1 rows, its pipeline declares \[rows, 4\]"
    ):
        loader(tmp_path).load(Key("toy", version.version))


@pytest.mark.parametrize("broken_from", [1, 4])
def test_compiling_that_fails_at_any_batch_size_leaves_the_plain_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_from: int
) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) >= broken_from:
                raise RuntimeError("no compiler here")
            return plain(x)

    plain = network()
    monkeypatch.setattr(torch, "compile", lambda *_, **__: Broken())
    version = toy_model(tmp_path, "toy", MODEL_YAML, {"w.safetensors": weights(plain)}, CODE)
    loaded = loader(tmp_path, compile=True).load(Key("toy", version.version))
    assert loaded.runner.run([[np.ones((4, 4), np.float32)]], 4, "fp32").finite.all()


def test_a_device_with_streams_captures_each_size_unless_told_not_to(tmp_path: Path) -> None:
    version = toy_model(tmp_path, "toy", MODEL_YAML, {"w.safetensors": weights(network())}, CODE)
    for wanted in (True, False):
        streams = FakeStreams(row_s=0.0, copy_s=0.0)
        batching = BatchingSettings(max_rows=4, sizes=(1, 2, 4))
        worker = WorkerSettings(cuda_graphs=wanted)
        settings = Settings(repository=tmp_path, batching=batching, worker=worker)
        ready = Loader(settings, FakeDevice(streams)).load(Key("toy", version.version))
        assert isinstance(ready.runner, StreamRunner)
        assert ready.runner.graphs.sizes == ((1, 2, 4) if wanted else ())
        assert [size for size, _ in ready.batch_s] == [1, 2, 4]
        assert streams.settled_after[0] == 0, "the weights have come before anything runs"
        assert bool(streams.of("computing", "replay")) == wanted


def test_needs_torch_only_when_a_served_model_does(tmp_path: Path) -> None:
    simulated = "pipeline: toy:Toy\nbackend: simulated\n"
    toy_model(tmp_path, "sim", simulated, {"simulated.json": b'{"a_ms": 1, "b_ms": 1}'})
    assert not needs_torch(Settings(repository=tmp_path))
    toy_model(tmp_path, "toy", MODEL_YAML, {"w.safetensors": weights(network())}, CODE)
    assert needs_torch(Settings(repository=tmp_path))
    assert not needs_torch(Settings(repository=tmp_path, models=("sim",)))
    assert needs_torch(Settings(repository=tmp_path / "absent"))


# ------------------------------------------------------------------ the runner


class Answer(nn.Module):
    """Says what it is told, one value per row."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = torch.tensor(values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), 4) + self.values[: len(x), None]


def runner(module: nn.Module) -> TorchRunner:
    return TorchRunner(module, ToyPipeline(), CPU, "fp32", 0)


def test_the_finite_check_is_per_row() -> None:
    values = (1.0, float("nan"), float("inf"), float("-inf"), 3e38)
    forward = runner(Answer(*values)).run([[np.zeros((5, 4), np.float32)]], 5, "fp32")
    assert forward.finite.tolist() == [True, False, False, False, True]


def test_minus_infinity_is_a_networks_way_to_rule_out_a_class() -> None:
    class Head(ToyPipeline):
        def head(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (torch.sigmoid(outputs[0]),)

    values = (float("-inf"), float("inf"))
    module = TorchRunner(Answer(*values), Head(), CPU, "fp32", 0)
    assert module.run([[np.zeros((2, 4), np.float32)]], 2, "fp32").finite.tolist() == [True, False]


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (ValueError("mine"), ValueError),
    ],
)
def test_what_the_network_raises_is_told_apart(error: Exception, meaning: type[Exception]) -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    with pytest.raises(meaning):
        runner(Raises()).run([[np.zeros((1, 4), np.float32)]], 1, "fp32")


def test_a_batch_of_one_and_of_many_agree() -> None:
    torch.manual_seed(0)
    module = runner(network().eval())
    rows = np.random.default_rng(1).random((16, 4), np.float32)
    together = module.run([[rows]], 16, "fp32").outputs[0]
    together = together.copy()
    alone = np.concatenate([module.run([[rows[n : n + 1]]], 1, "fp32").outputs[0].copy() for n in range(16)])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_results_are_brought_to_the_declared_datatype() -> None:
    class Doubles(ToyPipeline):
        @property
        def spec(self) -> PipelineSpec:
            one = TensorSpec(name="x", datatype="FP32", shape=(4,))
            return PipelineSpec(
                kind="tensors", inputs=(one,), outputs=(TensorSpec(name="y", datatype="INT32", shape=(4,)),)
            )

    module = TorchRunner(Answer(7.0), Doubles(), CPU, "fp32", 0)
    assert module.run([[np.zeros((1, 4), np.float32)]], 1, "fp32").outputs[0].dtype == np.int32


# ------------------------------------------------------------------ the device


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device.find("auto", 0, 1).name == "cpu"
    assert torch_device.find("cpu", 3, 1).name == "cpu"


@pytest.mark.parametrize(
    ("setting", "index", "wanted"), [("cuda", 0, "cuda:0"), ("cuda", 2, "cuda:2"), ("cuda:7", 0, "cuda:7")]
)
def test_a_gpu_that_is_not_there_is_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, setting: str, index: int, wanted: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match=f"means {wanted} for worker {index}; torch sees 0 CUDA") as caught:
        torch_device.find(setting, index, 1)
    assert caught.value.exit_code == 4
