from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from shared.repository import Repository
from shared.settings import Settings
from tests.support.desk import CPU
from tests.support.generating_worker import CONFIG, PIPELINE, generating
from tests.support.tiny_llama import TinyLlama
from tests.support.worker_parts import toy_model
from workers.backends.base import LoadFailed
from workers.generation.runner import GenerationRunner
from workers.loaded import Key, LoadedVersion
from workers.loading import Loader

NETWORK = "tests.support.tiny_llama:TinyLlama"
WEIGHTS = sum(parameter.nbytes for parameter in TinyLlama().parameters())
TOKEN = TinyLlama().token_bytes


def load(folder: Path, name: str = "texts", budget_bytes: int | None = None) -> LoadedVersion:
    root = folder / "models"
    version = Repository(root).open(name).version
    return Loader(Settings(repository=root), CPU, budget_bytes=budget_bytes).load(Key(name, version))


def model(folder: Path, config: str, *, context: int = 48, network: nn.Module | None = None) -> None:
    weights = safetensors.torch.save((network or TinyLlama()).state_dict())
    code = PIPELINE.replace("CONTEXT", str(context))
    toy_model(folder / "models", "texts", config, {"w.safetensors": weights}, CODE, texts=code)


CODE = """
import torch
from torch import nn

from tests.support.tiny_llama import TinyLlama


class Hungry(TinyLlama):
    def new_state(self, rows, tokens):
        if rows > 2:
            raise torch.OutOfMemoryError("no")
        return super().new_state(rows, tokens)


def plain():
    return nn.Linear(2, 2)


def small():
    return TinyLlama(vocabulary=63)
"""


def test_a_version_that_generates_is_warm_measured_and_counts_its_cache(tmp_path: Path) -> None:
    generating(tmp_path, sequences=4, tokens=160)
    loaded = load(tmp_path)
    limits = loaded.generation
    assert limits is not None
    assert (limits.sequences, limits.tokens) == (4, 160)
    assert 0 < limits.step_s < 60
    assert 0 < limits.prefill_s_per_token < 60
    assert (loaded.batch_s, loaded.buckets, loaded.row_cap, loaded.precision) == ([], [], None, "fp32")
    assert loaded.memory_bytes == WEIGHTS + 160 * TOKEN
    runner = loaded.runner
    assert isinstance(runner, GenerationRunner)
    assert runner._state is None, "warm-up has given its rows back"
    assert set(loaded.stages_s) >= {"read", "build", "device", "warm_up"}
    with pytest.raises(NotImplementedError, match="no batches"):
        runner.run([], 1, "fp32")


@pytest.mark.parametrize(
    ("budget_bytes", "tokens"),
    [(None, 16 * 48), (10**9, 16 * 48), (4 * 100 * TOKEN, 100), (1, 48)],
)
def test_without_a_setting_the_budget_bounds_the_cache(tmp_path: Path, budget_bytes: int | None, tokens: int) -> None:
    model(tmp_path, f"pipeline: texts:Texts\nnetwork: {NETWORK}\n")
    limits = load(tmp_path, budget_bytes=budget_bytes).generation
    assert limits is not None
    assert limits.tokens == tokens
    assert limits.sequences == 16


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            CONFIG.format(network="mine:plain", sequences=1, tokens=48),
            r"mine:plain\(\) gives Linear, which can't gener",
        ),
        (CONFIG.format(network="mine:small", sequences=1, tokens=48), "its tokenizer has 64 tokens, its network 63"),
        (
            CONFIG.format(network="mine:Hungry", sequences=3, tokens=48),
            r"3 sequence\(s\) do not fit the device's memory: lower generation.max_sequences",
        ),
        (
            f"pipeline: texts:Texts\nnetwork: {NETWORK}\nprecision: fp16\n",
            "precision is fp16, but text is generated in fp32: remove it",
        ),
        (
            "pipeline: texts:Texts\nbackend: simulated\n",
            "backend is simulated; text is generated with backend torch alone",
        ),
    ],
)
def test_what_can_not_generate_says_why(tmp_path: Path, config: str, says: str) -> None:
    networks = {"mine:plain": nn.Linear(2, 2), "mine:small": TinyLlama(vocabulary=63)}
    network = next((each for name, each in networks.items() if name in config), None)
    model(tmp_path, config, network=network)
    with pytest.raises(LoadFailed, match=says):
        load(tmp_path)


def test_a_block_for_texts_is_refused_where_there_are_none(tmp_path: Path) -> None:
    config = "pipeline: toy:Toy\nbackend: simulated\ngeneration: {max_sequences: 2}\n"
    timing = b'{"a_ms": 0, "b_ms": 0}'
    toy_model(tmp_path / "models", "texts", config, {"simulated.json": timing})
    with pytest.raises(LoadFailed, match="generation is given, but pipeline toy:Toy generates no text: remove it"):
        load(tmp_path)


def test_a_context_beyond_the_network_s_is_refused(tmp_path: Path) -> None:
    model(tmp_path, f"pipeline: texts:Texts\nnetwork: {NETWORK}\n", context=49)
    with pytest.raises(LoadFailed, match=r"preprocessing.context is 49, but its network takes 48 tokens"):
        load(tmp_path)


def test_a_smaller_context_than_the_network_s_bounds_texts(tmp_path: Path) -> None:
    model(tmp_path, f"pipeline: texts:Texts\nnetwork: {NETWORK}\n", context=30)
    runner = load(tmp_path).runner
    assert isinstance(runner, GenerationRunner)
    assert (runner.reader.context, runner.capacity.context) == (30, 30)


def test_a_stop_ends_the_warm_up(tmp_path: Path) -> None:
    generating(tmp_path)
    runner = load(tmp_path).runner
    assert isinstance(runner, GenerationRunner)
    with pytest.raises(LoadFailed, match="the worker stops"):
        runner.warm_up("texts", lambda: True, lambda _: None)


def test_a_network_that_gives_other_logits_than_it_says_is_an_error(tmp_path: Path) -> None:
    generating(tmp_path)
    runner = load(tmp_path).runner
    assert isinstance(runner, GenerationRunner)
    runner._network.extend = lambda *_: torch.zeros(1, 3)  # type: ignore[method-assign,assignment]  # on purpose
    with pytest.raises(RuntimeError, match=r"the network gives logits \[1, 3\] for 1 rows"):
        runner.warm_up("texts", lambda: False, lambda _: None)
