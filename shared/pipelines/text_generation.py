"""Text generation: a text or a conversation in, its continuation out, token by token.

The pool makes tokens of the text; from there on the worker runs the network step by step, chooses tokens and makes text
of them (`shared.generation`). A text is continued as it is, and may spell the model's markers; a conversation is put
into words by the model's chat template, and its contents may not.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from shared import generation
from shared.chat import ChatTemplate, check_tokens, read_messages
from shared.errors import InvalidInput, InvalidOption
from shared.generation import Detokeniser, GenerationOptions, Vocabulary
from shared.pipeline import Config, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Result, Text
from shared.tensors import Array, TensorSpec
from shared.text_tokens import opened, read_text
from shared.vocabulary import TokenizerFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS_PER_TOKEN = 64
"""A text with more characters than this for each token of the context is refused before it is made into tokens, which
takes a second per million: ordinary text has about four."""
_PLAIN_FILE = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"
File = Annotated[str, msgspec.Meta(pattern=_PLAIN_FILE)]


class TextGenerationConfig(Config, frozen=True):
    """The `preprocessing:` block of a generating model's model.yaml."""

    context: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)]
    """Most tokens of prompt and answer together, at most what the network was made for."""
    end: tuple[str, ...] = ()
    """Tokens that end an answer, as the tokenizer writes them."""
    tokenizer: File = "tokenizer.json"
    """A file of Hugging Face's `tokenizers`: in the version's folder, else in the model's folder."""
    chat_template: File = "chat_template.jinja"
    """Where there is such a file, the model also takes conversations."""
    template_values: dict[str, str] = {}  # noqa: RUF012 - a struct copies it
    """Further names in the chat template, such as `bos_token`."""
    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = "The river"
    """For trying whether the model works."""


class TextGeneration(Pipeline[GenerationOptions]):
    """Template → tokens | network, token after token, detokeniser |."""

    options_type = GenerationOptions
    config_type = TextGenerationConfig
    generates = True
    config: TextGenerationConfig

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """Raises StartupError: MODEL_LOAD for the tokenizer, BAD_SETTINGS for an end token that it does not have."""
        super().__init__(config, folder, labels)
        self.context = self.config.context
        """Tokens."""
        self._path = self.find_file(self.config.tokenizer)
        self._file = TokenizerFile(self._path)
        self._end_ids = tuple(self._file.number(content, "end") for content in self.config.end)
        self._file.forget_numbers()
        template = self.find_file(self.config.chat_template)
        markers = self._file.markers
        self._chat = ChatTemplate(template, self.config.template_values, markers) if template.is_file() else None
        self._tokeniser: Tokenizer | None = None

    @property
    def spec(self) -> PipelineSpec:
        """`tokens` INT32 [n] → `tokens` INT32 [m]."""
        tokens = TensorSpec(name="tokens", datatype="INT32", shape=(-1,), maximum=self._file.size)
        return PipelineSpec(kind="text", also=("chat",) if self._chat else (), inputs=(tokens,), outputs=(tokens,))

    def files(self) -> tuple[str, ...]:
        """The tokeniser's, and the chat template's where there is one."""
        return (self.config.tokenizer, *((self.config.chat_template,) if self._chat else ()))

    def vocabulary(self) -> Vocabulary:
        """The bytes of each token, and those that end an answer: for the worker."""
        return self._file.vocabulary(self._end_ids)

    def parse_options(self, given: dict[str, Any]) -> GenerationOptions:
        """Refuses what contradicts itself or the model. Raises InvalidOption naming the option."""
        options = super().parse_options(given)
        most = self.context - 1
        if "max_tokens" not in given:
            options = msgspec.structs.replace(options, max_tokens=min(options.max_tokens, most))
        elif options.max_tokens > most:
            raise InvalidOption(
                f"options.max_tokens is {options.max_tokens}: this model's context leaves room for {most} "
                "(preprocessing.context)"
            )
        _check_stops(options, self._file.size)
        _check_drawing(options)
        _check_beams(options)
        return options

    def open(self) -> None:
        """Read the tokeniser. Raises NotReady."""
        self._open()

    def preprocess(self, item: RawInput, options: GenerationOptions, out: list[Array]) -> Prepared:  # noqa: ARG002 - the hook's signature
        """`tokens` int32 [1, n]. Raises InvalidInput, NotReady."""
        chats = item.kind == "chat"
        text = self._spoken(item) if chats else self._written(item)
        ids = self._open().encode(text, add_special_tokens=not chats).ids
        name, most = item.kind, self.context - 1
        if not ids:
            raise InvalidInput(f"{name} makes no token of this model")
        if len(ids) > most:
            raise InvalidInput(
                f"{name} has {len(ids)} tokens; this model's context leaves room for {most} (preprocessing.context)"
            )
        return Prepared(tensors=[np.array([ids], np.int32)])

    def postprocess(
        self,
        outputs: list[Array],
        context: dict[str, Any],  # noqa: ARG002 - the hook's signature
        options: GenerationOptions,
    ) -> list[Result]:
        """One text per row of tokens. The worker does the same piece by piece."""
        vocabulary = self.vocabulary()
        return [_text_of(row.tolist(), vocabulary, options) for row in outputs[0]]

    def example(self) -> RawInput:
        """The beginning of a sentence."""
        return RawInput(kind="text", data=self.config.prompt.encode())

    def _written(self, item: RawInput) -> str:
        most = self.context * CHARACTERS_PER_TOKEN
        text, more = read_text(item.data, most)
        if not text:
            raise InvalidInput("text is empty; at least one character is needed")
        if more:
            raise InvalidInput(
                f"text has over {most} characters, too many for this model's context of {self.context} tokens "
                "(preprocessing.context)"
            )
        return text

    def _spoken(self, item: RawInput) -> str:
        if self._chat is None:
            raise InvalidInput("this model has no chat template: send text")
        most = self.context * CHARACTERS_PER_TOKEN
        messages = read_messages(item.data, most * 4)
        text = self._chat.render(messages, most)
        check_tokens(messages, self._open())
        return text

    def _open(self) -> "Tokenizer":
        if self._tokeniser is None:
            self._tokeniser = opened(self._path)
            # Whoever writes a whole prompt writes its markers, too; in conversations no content has any.
            self._tokeniser.encode_special_tokens = False
        return self._tokeniser


def _check_stops(options: GenerationOptions, tokens: int) -> None:
    if len(options.stop) > generation.MAX_STOP_STRINGS:
        raise InvalidOption(f"options.stop has {len(options.stop)} strings; at most {generation.MAX_STOP_STRINGS}")
    for number, stop in enumerate(options.stop):
        if not 1 <= len(stop) <= generation.MAX_STOP_CHARACTERS:
            raise InvalidOption(
                f"options.stop[{number}] has {len(stop)} characters; it has 1..{generation.MAX_STOP_CHARACTERS}"
            )
    ids = options.stop_token_ids
    if len(ids) > generation.MAX_STOP_TOKENS:
        raise InvalidOption(f"options.stop_token_ids has {len(ids)} entries; at most {generation.MAX_STOP_TOKENS}")
    for number, token in enumerate(ids):
        if not 0 <= token < tokens:
            raise InvalidOption(f"options.stop_token_ids[{number}] is {token}: this model's tokens are 0..{tokens - 1}")


def _check_drawing(options: GenerationOptions) -> None:
    if options.seed is not None and options.seed > generation.MAX_SEED:
        raise InvalidOption(f"options.seed is {options.seed}: it is 0..{generation.MAX_SEED}")
    if options.temperature > 0:
        return
    alone = _drawn_by(options)
    if alone and options.beams == 1:
        raise InvalidOption(
            f"options.{alone[0]} needs options.temperature above 0: without it the likeliest token is always taken"
        )


def _check_beams(options: GenerationOptions) -> None:
    if options.beams == 1:
        if options.length_penalty != 1:
            raise InvalidOption("options.length_penalty needs options.beams above 1: it compares the texts of several")
        return
    drawn = ["temperature"] if options.temperature > 0 else []
    drawn += [*_drawn_by(options), *(["seed"] if options.seed is not None else [])]
    if drawn:
        raise InvalidOption(
            f"options.{drawn[0]} contradicts options.beams ({options.beams}): beam search draws nothing; leave one out"
        )


def _drawn_by(options: GenerationOptions) -> list[str]:
    """Options that mean something only where tokens are drawn."""
    return [name for name, unset in (("top_k", 0), ("top_p", 1.0)) if getattr(options, name) != unset]


def _text_of(tokens: list[int], vocabulary: Vocabulary, options: GenerationOptions) -> Text:
    detokeniser = Detokeniser(vocabulary, options.stop)
    ends = vocabulary.end_ids | set(options.stop_token_ids)
    parts = []
    for token in tokens:
        if token in ends or detokeniser.stopped:
            break
        parts.append(detokeniser.feed(token))
    return Text("".join([*parts, detokeniser.finish()]))
