from pathlib import Path

import pytest

from shared.errors import ExitCode
from shared.model_config import ModelConfig, RepositoryError, read_config

ROOT = Path(__file__).parents[3]


def _read(tmp_path: Path, text: str) -> ModelConfig:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.yaml").write_text(text)
    return read_config(folder)


def test_the_default_model_is_described_completely() -> None:
    config = read_config(ROOT / "models" / "efficientnet-lite0")
    assert config.pipeline == "image_classification"
    assert config.network == "workers.networks.efficientnet_lite:efficientnet_lite0"
    assert config.labels == "labels.txt"
    assert config.preprocessing["size"] == 224


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("backend: simulated\n", None, "pipeline is required"),
        ("pipeline: tensor\n", None, "network is required when backend is torch"),
        ("pipeline: tensor\nbackend: simulated\nnetwork: a:b\n", None, "backend simulated runs none"),
        ("pipeline: tensor\nbackend: onnxruntime\nnetwork: a:b\n", None, "takes it from the .onnx file"),
        ("pipeline: tensor\nbackend: onnxruntime\nprecision: fp16\n", None, "precision is fp16, but backend onnx"),
        ("pipeline: tensor\nbackend: numpy\ntrust: code\n", None, "network is required when backend is numpy"),
        ("pipeline: tensor\ntrust: yes\nnetwork: a:b\n", 2, "trust"),
        (
            "pipeline: tensor\nbackend: onnxruntime\nonnx: {gpu_mem_limit_bytes: 5}\n",
            3,
            "onnx.gpu_mem_limit_bytes is 5",
        ),
        (
            "pipeline: tensor\nbackend: onx\n",
            2,
            "backend is 'onx': must be 'torch', 'onnxruntime', 'numpy' or 'simulated'",
        ),
        ("pipelin: tensor\nbackend: simulated\n", 1, "unknown key pipelin (did you mean pipeline?)"),
        ("pipeline: tensor\nbackend: simulated\nmax_rows: 5\n", 3, "(did you mean batching.max_rows?)"),
        ("pipeline: tensor\nbackend: simulated\nbatching:\n  max_rows: 0\n", 4, "batching.max_rows is 0"),
        ("pipeline: tensor\nbackend: simulated\nbatching:\n  max_rows: true\n", 4, "must not be true or false"),
        ("pipeline: tensor\nnetwork: a:b\ngeneration: {max_sequences: 0}\n", 3, "generation.max_sequences is 0"),
        ("pipeline: tensor\nnetwork: a:b\ngeneration: {cache_tokens: 15}\n", 3, "generation.cache_tokens is 15"),
        (
            "pipeline: tensor\nnetwork: a:b\ngeneration: {cache_tokens: 100}\n",
            3,
            "cache_tokens is 100, which is under 16 for each of max_sequences (16): raise it or lower max_sequences",
        ),
        ("pipeline: tensor\nnetwork: os.system\n", 2, "network is 'os.system'"),
        ("pipeline: ../x\nbackend: simulated\n", 1, "pipeline is '../x'"),
        ("pipeline: tensor\nbackend: simulated\nlabels: ../../etc/passwd\n", 3, "labels is '../../etc/passwd'"),
        ("pipeline: tensor\nbackend: simulated\nlabels: /etc/passwd\n", 3, "labels is '/etc/passwd'"),
        ("pipeline: tensor\nbackend: simulated\npreprocessing: 5\n", 3, "preprocessing is 5: must be a group of keys"),
        ("pipeline: tensor\npipeline: tensor\n", 2, "pipeline is given twice"),
        ("pipeline: !!python/name:os.system x\n", 1, "is not allowed"),
        ("pipeline: tensor\n\tbackend: x\n", 2, "holds a tab"),
        ("", None, "pipeline is required"),
    ],
)
def test_a_mistake_names_the_model_the_line_and_the_key(
    tmp_path: Path, text: str, line: int | None, words: str
) -> None:
    with pytest.raises(RepositoryError) as caught:
        _read(tmp_path, text)
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS
    assert caught.value.text.startswith(f"m/model.yaml:{line}: " if line else "m/model.yaml: ")
    assert words in caught.value.text
    assert str(tmp_path) not in caught.value.text


def test_a_user_pipeline_and_a_network_in_the_folder(tmp_path: Path) -> None:
    config = _read(tmp_path, "pipeline: mine:Pipeline\nnetwork: nets.small:build\nprecision: fp32\nbatching:\n")
    assert (config.pipeline, config.network, config.precision) == ("mine:Pipeline", "nets.small:build", "fp32")
