"""Conversations put into words by a model's chat template (Jinja, as published with models). Used in pool processes.

A template comes with the model's files and is data like they are: it runs in Jinja's sandbox, can reach nothing, change
nothing, and the usual ways to make a long text out of a short one at a stroke are shut. Others are left (`replace`, `~`
again and again): what becomes too large or runs too long ends with the pool's limits, `pool.memory_bytes` and
`pool.job_limit_ms`. A content that spells one of the model's markers, or that the tokenizer turns into one, is refused:
with it, one who speaks could speak for another.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec

from shared.errors import InvalidInput, NotReady
from shared.logs import get_logger

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

MAX_TEMPLATE_BYTES = 256 * 1024
"""Of a chat template; published ones with tools and documents have some 10 KB."""
_MAX_REPEATED = 100_000
"""Characters or entries that a single multiplication in a template may make."""
_STRETCHING = frozenset({"format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs"})
"""Methods and filters that make any length out of a number."""

_log = get_logger()


class Message(msgspec.Struct, frozen=True, array_like=True):
    """What one of them said."""

    role: Literal["system", "user", "assistant"]
    content: str


def read_messages(data: bytes | memoryview, most: int) -> list[Message]:
    """The messages of a `chat` input: JSON, `[[role, content], …]`, with at most `most` bytes. Raises InvalidInput."""
    if len(data) > most:
        raise InvalidInput(f"chat has {len(data)} bytes; this model takes {most}: leave out its oldest messages")
    try:
        messages = msgspec.json.decode(bytes(data), type=list[Message])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInput(f"chat can't be read: {str(error)[:200]}") from None
    if not messages:
        raise InvalidInput("chat.messages is empty: at least one is needed")
    return messages


class ChatTemplate:
    """Opens its file with the first conversation. Not for several threads at a time."""

    def __init__(self, path: Path, values: Mapping[str, str], markers: Sequence[str]) -> None:
        """`values`: further names in the template, such as `bos_token`; `markers`: what no content may spell."""
        self._path = path
        self._values = dict(values)
        self._markers = tuple(marker for marker in markers if marker)
        self._opened: jinja2.Template | None = None

    def render(self, messages: Sequence[Message], most: int) -> str:
        """The prompt that asks for the next answer, at most `most` characters. Raises InvalidInput, NotReady."""
        self._check(messages)
        template = self._opened = self._opened or _open(self._path)
        spoken = [{"role": message.role, "content": message.content} for message in messages]
        parts, length = [], 0
        try:
            for part in template.generate(messages=spoken, add_generation_prompt=True, **self._values):
                length += len(part)
                if length > most:
                    break
                parts.append(part)
        except _Refused as refusal:
            raise InvalidInput(f"the model's chat template refuses chat: {str(refusal)[:200]}") from None
        except Exception as error:  # noqa: BLE001 - a template may raise anything that its words can
            reason = f"{type(error).__name__}: {error}"[:200]
            raise InvalidInput(f"the model's chat template can't put chat into words: {reason}") from None
        if length > most:
            raise InvalidInput(f"chat has over {most} characters in the words of the model's chat template")
        return "".join(parts)

    def _check(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages):
            found = next((marker for marker in self._markers if marker in message.content), None)
            if found is not None:
                raise _speaks_for_another(number, found)


def check_tokens(messages: Sequence[Message], tokeniser: "Tokenizer") -> None:
    """Refuse contents in which the tokenizer finds a marker that is not there literally. Raises InvalidInput.

    Many normalise first, and full-width letters become plain ones. With many an unknown character is a special token,
    too, but no marker: it stays one where special tokens are read as text. `tokeniser` takes them for what they are.
    """
    special = {number for number, token in tokeniser.get_added_tokens_decoder().items() if token.special}
    for number, message in enumerate(messages):
        found = _among(special, tokeniser, message.content)
        if not found:
            continue
        tokeniser.encode_special_tokens = True
        try:
            harmless = _among(special, tokeniser, message.content)
        finally:
            tokeniser.encode_special_tokens = False
        if len(found) > len(harmless):
            marker = next((one for one in found if one not in harmless), found[0])
            raise _speaks_for_another(number, tokeniser.id_to_token(marker) or "")


def _among(special: set[int], tokeniser: "Tokenizer", text: str) -> list[int]:
    return [one for one in tokeniser.encode(text, add_special_tokens=False).ids if one in special]


def _speaks_for_another(number: int, marker: str) -> InvalidInput:
    return InvalidInput(
        f"chat.messages[{number}].content holds {marker!a}, a marker of this model, with which one could "
        "speak for another: leave it out"
    )


class _Refused(Exception):
    """The template called `raise_exception`."""


def _refuse(text: object = "") -> NoReturn:
    raise _Refused(str(text))


def _open(path: Path) -> "jinja2.Template":
    """Raises NotReady."""
    import jinja2  # noqa: PLC0415 - only a pool process needs it

    try:
        return _environment().from_string(_source(path))
    except (OSError, ValueError, jinja2.TemplateError) as error:
        _log.error("a chat template can't be used", file=path.name, reason=str(error)[:300])
        raise NotReady(f"the model's {path.name} can't be used as a chat template, see the log") from error


def _source(path: Path) -> str:
    with path.open("rb") as file:
        source = file.read(MAX_TEMPLATE_BYTES + 1)
    if len(source) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"it has more than {MAX_TEMPLATE_BYTES} bytes")
    return source.decode()


def _environment() -> "jinja2.Environment":
    from jinja2 import sandbox  # noqa: PLC0415 - as above

    class Bounded(sandbox.ImmutableSandboxedEnvironment):
        """The sandbox, and nothing that makes a long text out of a short one at a stroke."""

        intercepted_binops = frozenset({"*", "**", "%", "+"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - Jinja's own signature
            _bound(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401 - Jinja's own signature
            return attr not in _STRETCHING and super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value: Any) -> None:  # noqa: ANN401 - Jinja's own signature
            """Jinja would allow `format` with safe attributes; None: then it is judged as any other."""

    # As `transformers` sets it, for which templates are written.
    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    for name in _STRETCHING | {"indent"}:
        environment.filters.pop(name, None)
    environment.globals["raise_exception"] = _refuse
    return environment


def _bound(operator: str, left: object, right: object) -> None:
    """Raises OverflowError for an operation that may make more than `_MAX_REPEATED` of something."""
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    numbers = [abs(side) for side in (left, right) if isinstance(side, int | float)]
    if operator == "*":
        large = bool(sizes) and sizes[0] * max(numbers, default=0) > _MAX_REPEATED
        large = large or (not sizes and max(numbers, default=0) > 2**64)
    elif operator == "**":
        large = True
    elif operator == "%":
        large = isinstance(left, str)
    else:
        large = sum(sizes) > 10_000_000
    if large:
        raise OverflowError(f"{operator} makes too much")
