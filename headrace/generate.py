"""`headrace generate`: one text while it grows, or many prompts with a progress bar; JSON lines for programs."""

import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import track

from headrace.client import Client
from headrace.client_errors import InferenceError
from headrace.client_text import GenerateOptions, Prompt, TextSoFar
from headrace.client_tokens import Token
from headrace.many_inputs import Server, reason_of
from headrace.output import json_line, literal, printable

IN_FLIGHT = 8
"""Prompts on their way at a time: about as many as a small worker generates side by side."""
_LINES = re.compile(r"([\n\t])")


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for, apart from the prompts."""

    model: str
    options: GenerateOptions
    system: str = ""
    """Said first in a conversation."""
    chat: bool = False
    """Prompts are what the user says, and not texts to be continued."""

    def prompt(self, given: str) -> Prompt:
        """As the client takes it."""
        if not (self.chat or self.system):
            return given
        said = [{"role": "system", "content": self.system}] if self.system else []
        return [*said, {"role": "user", "content": given}]


@dataclass(frozen=True)
class Done:
    """One prompt's end."""

    prompt: str
    text: TextSoFar
    """What came of it, also before an error."""
    error: InferenceError | None = None


def run(prompts: Sequence[str], wanted: Wanted, server: Server, *, as_json: bool) -> int:
    """Generate and print. Returns 0, or 1 when any prompt failed."""
    with Client(server.address, timeout_s=server.timeout_s) as client:
        if len(prompts) == 1 and not as_json:
            return _read_along(client, prompts[0], wanted)
        failed = 0
        for done in _shown_progress(_all(client, prompts, wanted), len(prompts)):
            failed += done.error is not None
            if as_json:
                sys.stdout.write(json_line(_row(done)) + "\n")
            else:
                _print(done)
    if failed and (as_json or len(prompts) > 1):
        sys.stderr.write(f"headrace: {failed} of {len(prompts)} texts could not be generated\n")
    return 1 if failed else 0


def _read_along(client: Client, prompt: str, wanted: Wanted) -> int:
    """Print each piece as it comes."""
    text = client.generate(wanted.prompt(prompt), model=wanted.model, **wanted.options)
    ends_line = True
    try:
        with text:
            for piece in text:
                sys.stdout.write(_safe(piece))
                sys.stdout.flush()
                ends_line = piece.endswith("\n")
    except InferenceError as error:
        sys.stdout.write("" if ends_line else "\n")
        sys.stdout.flush()
        sys.stderr.write(f"headrace: {printable(reason_of(error))}\n")
        return 1
    sys.stdout.write("" if ends_line else "\n")
    sys.stdout.flush()
    if sys.stderr.isatty():
        Console(stderr=True).print(literal(_told(text), "dim"), soft_wrap=True)
    return 0


def _told(text: TextSoFar) -> str:
    """The line below a text."""
    facts = [f"{text.model} {text.version}"]
    if text.finished is not None:
        prompt, answer = text.finished.prompt_tokens, text.finished.completion_tokens
        facts.append(f"{prompt} + {answer} tokens, ended by {text.finished.reason.replace('_', ' ')}")
        if answer > 1 and text.server_timing.run_ms:
            facts.append(f"{text.server_timing.run_ms / answer:.1f} ms a token")
    if text.server_timing.first_ms:
        facts.append(f"first after {text.server_timing.first_ms:.0f} ms")
    return "  ".join(facts)


def _safe(piece: str) -> str:
    """Its lines stay lines; what would steer a terminal is shown instead. A file or pipe gets the text as it is."""
    if not sys.stdout.isatty():
        return piece
    return "".join(part if part in "\n\t" else printable(part) for part in _LINES.split(piece))


def _all(client: Client, prompts: Iterable[str], wanted: Wanted) -> Iterator[Done]:
    """Every prompt's end, in their order; `IN_FLIGHT` are on their way at a time."""
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        under_way: deque[Future[Done]] = deque()
        try:
            for prompt in prompts:
                under_way.append(threads.submit(_one, client, prompt, wanted))
                if len(under_way) >= 2 * IN_FLIGHT:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _one(client: Client, prompt: str, wanted: Wanted) -> Done:
    text = client.generate(wanted.prompt(prompt), model=wanted.model, **wanted.options)
    try:
        return Done(prompt, text.whole())
    except InferenceError as error:
        return Done(prompt, text, error)


def _shown_progress(done: Iterable[Done], total: int) -> Iterable[Done]:
    console = Console(stderr=True)
    if total == 1 or not console.is_terminal:
        return done
    return track(done, "generating", total=total, console=console, transient=True)


def _row(done: Done) -> dict[str, Any]:
    """For programs: with an error, what came before it."""
    text, row = done.text, {"prompt": done.prompt, "text": done.text.text}
    if done.error is not None:
        return {**row, "error": {"reason": done.error.reason, "text": reason_of(done.error)}}
    return {
        **row,
        **({"tokens": [_token(one) for one in text.tokens]} if text.tokens else {}),
        "finished": asdict(text.finished) if text.finished is not None else None,
        "model": text.model,
        "version": text.version,
        "request_id": text.request_id,
        "server_timing": asdict(text.server_timing),
    }


def _token(one: Token) -> dict[str, Any]:
    """A token may be part of a character: its bytes, too."""
    return {
        "id": one.id,
        "text": one.data.decode(errors="replace"),
        "bytes": list(one.data),
        "logprob": one.logprob,
        "alternatives": [_token(other) for other in one.alternatives],
    }


def _print(done: Done) -> None:
    """One of many."""
    console = Console(soft_wrap=True)
    console.print(literal(done.prompt, "bold"))
    sys.stdout.write(_safe(done.text.text) + "\n\n")
    sys.stdout.flush()
    if done.error is not None:
        sys.stderr.write(f"headrace: {printable(done.prompt[:40])}: {printable(reason_of(done.error))}\n")
