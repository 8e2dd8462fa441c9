"""A tiny language model for tests: a WordPiece tokeniser of a few hundred pieces, and a BERT of random weights."""

from pathlib import Path
from typing import cast

import safetensors.torch
import torch
from torch import Tensor, nn

from shared.repository import Meta
from shared.repository_writer import add_version

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = (  # noqa: SIM905 - a list would take forty lines
    "the river turns wheel of mill a man is eating food cat sat on mat and dog ran home in rain anna lives berlin "
    "works for acme corp visited new york last year he she they it was not very good bad day long short text"
).split()
WIDTH, HEADS, LAYERS, POSITIONS = 32, 4, 2, 128


def vocabulary() -> list[str]:
    """Special tokens, whole words, and every letter alone and inside a word, so that any Latin word has pieces."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    signs = ".,!?'-🙂東京"
    return [*SPECIAL, *WORDS, *letters, *(f"##{letter}" for letter in letters), *signs]


def write_tokeniser(folder: Path, name: str = "tokenizer.json", *, padded: bool = True) -> Path:
    """A tokenizer.json as they come: with padding and cutting switched on."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors  # noqa: PLC0415 - not every test

    pieces = vocabulary()
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokeniser = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))  # noqa: S106 - no password
    tokeniser.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokeniser.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokeniser.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    )
    tokeniser.add_special_tokens(list(SPECIAL))
    if padded:
        tokeniser.enable_padding(length=128)
        tokeniser.enable_truncation(128)
    path = folder / name
    tokeniser.save(str(path))
    return path


class Block(nn.Module):
    """One layer of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        """`[rows, tokens, width]` → the same."""
        x = self.first(x + self.attention(x, x, x, key_padding_mask=ignored, need_weights=False)[0])
        return cast("Tensor", self.second(x + self.outer(nn.functional.gelu(self.inner(x)))))


class TinyBert(nn.Module):
    """Ids and mask `[rows, tokens]` → states `[rows, tokens, width]`, or `[rows, (tokens,) classes]`."""

    def __init__(self, classes: int | None = None, *, per_token: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(len(vocabulary()), WIDTH)
        self.places = nn.Embedding(POSITIONS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.classes = None if classes is None else nn.Linear(WIDTH, classes)
        self.per_token = per_token

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """See the class."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        ignored = torch.zeros(mask.shape, device=mask.device).masked_fill(mask == 0, -1e4)
        for layer in self.layers:
            x = layer(x, ignored)
        if self.classes is None:
            return cast("Tensor", x)
        return cast("Tensor", self.classes(x if self.per_token else x[:, 0]))


def tiny_bert() -> TinyBert:
    """The same weights in every process."""
    torch.manual_seed(7)
    return TinyBert().eval()


def tiny_classifier() -> TinyBert:
    """Three classes a text."""
    torch.manual_seed(8)
    return TinyBert(3).eval()


def tiny_tagger() -> TinyBert:
    """Five classes a token."""
    torch.manual_seed(9)
    return TinyBert(5, per_token=True).eval()


TEXTS = (
    "the river turns the wheel of the mill",
    "a cat sat on the mat",
    "dog",
    "she was not very good",
    "Anna lives in Berlin and works for Acme Corp, he visited New York last year.",
    "a man is eating food " * 5,
    "été 🙂 東京",
    "the long and short text of a very good day in the rain, they ran home; it was not bad " * 2,
)
"""Of mixed lengths."""


MODELS = {
    "embed": ("text_embedding", "tiny_bert", ()),
    "classify": ("text_classification", "tiny_classifier", ("toxic", "kind", "neutral")),
    "tag": ("token_classification", "tiny_tagger", ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
}
"""Name → pipeline, network, labels."""
MAX_TOKENS = 64
"""Of one text of these."""


def write_models(root: Path, batching: str = "") -> Path:
    """A model repository of all tasks. The networks' code is this file, in each model's folder."""
    root.mkdir(parents=True)
    for name, (pipeline, factory, labels) in MODELS.items():
        folder = root / name
        folder.mkdir()
        (folder / "tiny.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
        named = "labels: labels.txt\n" if labels else ""
        settings = f"preprocessing:\n  max_tokens: {MAX_TOKENS}\n  vocabulary: {len(vocabulary())}\n"
        (folder / "model.yaml").write_text(
            f"pipeline: {pipeline}\nnetwork: tiny:{factory}\n{named}{batching}{settings}"
        )
        files = {"model.safetensors": root / "model.safetensors", "tokenizer.json": write_tokeniser(root)}
        network: nn.Module = globals()[factory]()
        safetensors.torch.save_file(network.state_dict(), files["model.safetensors"])
        if labels:
            files["labels.txt"] = root / "labels.txt"
            files["labels.txt"].write_text("".join(f"{label}\n" for label in labels))
        add_version(root, name, files, Meta(source="test"), make_current=True, by="test")
        for path in files.values():
            path.unlink()
    return root
