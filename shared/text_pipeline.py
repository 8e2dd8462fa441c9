"""What the pipelines of texts have in common: tokens in, a mask for the padding, batches by length.

The pool turns a text into token ids, as many as it has; texts of like length share a batch, in which the worker fills
up the shorter ones. The network gets ids and mask, both int64 `[n, length]`.
"""

import abc
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from shared.errors import ExitCode, StartupError
from shared.lengths import Shapes
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.tensors import Array, TensorSpec
from shared.text_tokens import Tokeniser, Tokens

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 8192
"""Of one text; more would make a batch of one text a matter of seconds."""
SHORTEST = 16
"""Tokens of the shortest length where model.yaml names none: shorter batches are hardly faster."""
PADDING = -1
"""Stands where a text has ended: no token has this id, so that nothing in a text can be taken for it."""

USUAL_NAMES = {
    "tokens": frozenset({"input_ids", "ids", "tokens"}),
    "mask": frozenset({"attention_mask", "input_mask", "mask"}),
    "types": frozenset({"token_type_ids", "segment_ids", "types"}),
}
"""What inputs are called in ONNX files of such networks."""

Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Argument = Literal["tokens", "mask", "types"]


class TextConfig(Config, frozen=True):
    """What the `preprocessing:` block of every model of texts has."""

    tokenizer: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")] = "tokenizer.json"
    """A file of Hugging Face's `tokenizers`: in the version's folder, else in the model's folder."""
    max_tokens: Length = 256
    """Most tokens of one text, special ones included; what is longer is cut, or refused (options.truncate)."""
    lengths: Annotated[tuple[Length, ...], msgspec.Meta(max_length=16)] = ()
    """Tokens that batches are padded up to, rising; the last is max_tokens. None given: 16, 32, 64, … max_tokens."""
    padding_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """The token that the network sees where a text has ended; the mask says that it does not count."""
    vocabulary: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Tokens that the network knows; needed only when they are fewer than 256."""
    arguments: Annotated[tuple[Argument, ...], msgspec.Meta(min_length=1, max_length=3)] = ("tokens", "mask")
    """What the network takes, in its order. `mask`: 1 where there is text, 0 where there is padding. `types`: zeros."""


class TextOptions(Options, frozen=True):
    """What every request with a text may say."""

    truncate: bool = True
    """Whether the end of a text that is too long is left out; else it is refused."""


O = TypeVar("O", bound=TextOptions)  # noqa: E741 - as in shared.pipeline


class TextPipeline(Pipeline[O]):
    """Base of the pipelines of texts: each adds its outputs, its `head` or `reduce`, and `postprocess`."""

    config: TextConfig

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """Raises StartupError: BAD_SETTINGS for contradictory lengths, MODEL_LOAD for a missing tokeniser."""
        super().__init__(config, folder, labels)
        self.lengths = _lengths(self.config)
        self._warm_shapes: tuple[Shapes, ...] = tuple(((length,),) for length in self.lengths)
        path = self.find_file(self.config.tokenizer)
        if not path.is_file():
            raise StartupError(
                ExitCode.MODEL_LOAD,
                f"{self.config.tokenizer} (preprocessing.tokenizer) is neither in the version's nor in the model's "
                "folder",
            )
        self._tokeniser = Tokeniser(path, self.config.max_tokens)

    @abc.abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What leaves the worker."""

    @cached_property
    def spec(self) -> PipelineSpec:
        """`tokens` INT32 [-1], as long as the text; outputs as the task has them."""
        return PipelineSpec(kind="text", inputs=(_tokens(self.config),), outputs=self.outputs())

    def warm_shapes(self) -> tuple[Shapes, ...]:
        """One for each length."""
        return self._warm_shapes

    def files(self) -> tuple[str, ...]:
        """The tokeniser's."""
        return (self.config.tokenizer,)

    def open(self) -> None:
        """Read the tokeniser. Raises NotReady."""
        self._tokeniser.open()

    def preprocess(self, item: RawInput, options: O, out: list[Array]) -> Prepared:  # noqa: ARG002 - the hook's signature
        """`tokens` int32 [1, length]. Raises InvalidInput."""
        tokens = self._tokeniser.encode(item.data, truncate=options.truncate)
        return Prepared(tensors=[tokens.ids[None]], context=self.context(tokens))

    def context(self, tokens: Tokens) -> dict[str, Any]:
        """What `postprocess` has to know of the text."""
        return {"tokens": len(tokens.ids), "truncated": tokens.truncated}

    def normalise(self, inputs: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        """int32 [n, length] → the network's arguments, int64 [n, length] each, on the same device."""
        tokens = inputs["tokens"]
        given = {
            "tokens": lambda: tokens.masked_fill(tokens < 0, self.config.padding_id).long(),
            "mask": lambda: mask_of(tokens).long(),
            "types": lambda: tokens.new_zeros(tokens.shape).long(),
        }
        return tuple(given[name]() for name in self.config.arguments)

    def argument_names(self) -> tuple[frozenset[str], ...]:
        """Those that exporters give them."""
        return tuple(USUAL_NAMES[name] for name in self.config.arguments)

    def example(self) -> RawInput:
        """A short sentence."""
        return RawInput(kind="text", data=b"The river turns the wheel.")


def mask_of(tokens: "torch.Tensor") -> "torch.Tensor":
    """Bool [n, length]: true where there is text."""
    return tokens >= 0


def _tokens(config: TextConfig) -> TensorSpec:
    return TensorSpec(name="tokens", datatype="INT32", shape=(-1,), maximum=config.vocabulary, fill=PADDING)


def _lengths(config: TextConfig) -> tuple[int, ...]:
    """Raises StartupError(BAD_SETTINGS)."""
    most, given = config.max_tokens, config.lengths
    if not given:
        return (*(1 << n for n in range(SHORTEST.bit_length() - 1, most.bit_length()) if 1 << n < most), most)
    if list(given) != sorted(set(given)):
        raise StartupError(ExitCode.BAD_SETTINGS, f"preprocessing.lengths {list(given)} must be lengths that rise")
    if given[-1] != most:
        raise StartupError(
            ExitCode.BAD_SETTINGS,
            f"preprocessing.lengths {list(given)} must end with preprocessing.max_tokens ({most})",
        )
    return given
