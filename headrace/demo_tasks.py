"""The demo's other parts: boxes, vectors, classes of texts, and text that grows, each on real input."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.client import Client
from headrace.client_results import Detected
from headrace.client_results import Text as TextInput
from headrace.drawing import draw_file
from headrace.output import literal
from headrace.zoo_samples import fetch_pictures

ON_THE_STREET = {"person": 4, "bus": 1}
"""In bus.jpg; any detector of COCO's classes finds them."""
SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "How do I reset my password?",
    "I forgot my login credentials.",
)
"""The first two mean nearly the same, and so do the last two."""
ALIKE, UNLIKE = 0.6, 0.3
COMMENTS = (
    ("You are a stupid idiot.", True),
    ("What a lovely photograph, thank you!", False),
    ("The meeting starts at nine on Monday.", False),
)
"""With whether they are rude."""
QUESTION, ANSWER = "What is the capital of France?", "Paris"
PROMPTS = ("Why is the sky blue?", "Name three rivers.", "What is a turbine?")
"""Answered side by side."""


class Demo(NamedTuple):
    """What every part has at hand."""

    console: Console
    client: Client
    repository: Path
    """The models that are served."""
    samples: Path
    """The repository beside which pictures and downloads are kept."""


Part = Callable[[Demo], bool]
"""Shows something, and tells whether it was right. Raises InferenceError."""


def verdict(console: Console, text: str, *, good: bool) -> bool:
    """One line with a mark; returns `good`."""
    console.print(
        Text("✓ " if good else "✗ ", style="green" if good else "red"), text, sep="", highlight=False, soft_wrap=True
    )
    return good


def detect(demo: Demo) -> bool:
    """Boxes in two pictures, drawn into copies of them."""
    pictures = fetch_pictures(demo.samples)
    table = Table(box=SIMPLE_HEAD, title="Objects in pictures", title_justify="left", padding=(0, 1, 0, 0))
    for heading in ("picture", "found"):
        table.add_column(heading, overflow="fold")
    found: list[Detected] = []
    copies: list[Path] = []
    for path in pictures:
        answer = demo.client.detect(path, model="yolov3-tiny")
        drawn = path.with_name(f"{path.stem}-found.png")
        draw_file(path, drawn, answer.detections)
        best = ", ".join(f"{one.label.name} {one.label.score * 100:.0f} %" for one in answer.detections)
        table.add_row(path.name, literal(best))
        copies.append(drawn)
        found.append(answer)
    demo.console.print(table)
    for copy in copies:
        demo.console.print(literal(f"drawn: {copy}", "dim"), soft_wrap=True)
    on_the_street = Counter(one.label.name for one in found[0].detections)
    return verdict(
        demo.console,
        f"bus.jpg: {on_the_street['person']} persons and {on_the_street['bus']} bus (4 and 1 are there)",
        good=on_the_street == ON_THE_STREET,
    )


def embed(demo: Demo) -> bool:
    """How alike sentences are, by their vectors."""
    vectors = np.array([demo.client.embed(text, model="all-minilm-l6-v2").values for text in SENTENCES])
    alike = vectors @ vectors.T
    table = Table(box=SIMPLE_HEAD, title="How alike sentences are", title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("sentence")
    for number in range(len(SENTENCES)):
        table.add_column(str(number + 1), justify="right")
    for number, (text, row) in enumerate(zip(SENTENCES, alike, strict=True), 1):
        table.add_row(f"{number}. {text}", *(f"{value:.2f}" for value in row))
    demo.console.print(table)
    pairs, others = (alike[0, 1], alike[2, 3]), alike[:2, 2:].ravel()
    good = min(pairs) > ALIKE and max(others) < UNLIKE
    return verdict(demo.console, f"like ones are above {ALIKE:g}, unlike ones below {UNLIKE:g}", good=good)


def texts(demo: Demo) -> bool:
    """Comments and how rude they are."""
    table = Table(box=SIMPLE_HEAD, title="Classes of texts", title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("text")
    table.add_column("likeliest class")
    table.add_column("score", justify="right")
    good = True
    for text, rude in COMMENTS:
        answer = demo.client.predict([TextInput(text)], model="toxic-comment").results[0]
        top = answer.top  # type: ignore[union-attr]  # a classifier of texts answers nothing else
        table.add_row(literal(text), literal(top.name), f"{top.score * 100:.1f} %")
        good &= (top.score > 0.5) == rude
    demo.console.print(table)
    return verdict(demo.console, "the rude one is told from the others", good=good)


def generate(demo: Demo) -> bool:
    """A question answered while one reads along, and three more side by side."""
    demo.console.print(Text("\nText that grows", style="italic"))
    demo.console.print(literal(f"? {QUESTION}", "bold"))
    demo.console.print("  ", end="")
    text = ""
    for piece in demo.client.generate(said(QUESTION), model="smollm2-135m", max_tokens=40):
        demo.console.print(literal(piece), end="", soft_wrap=True)
        text += piece
    demo.console.print()
    started_s = time.monotonic()
    growing = [demo.client.generate(said(prompt), model="smollm2-135m", max_tokens=24) for prompt in PROMPTS]
    whole = [one.whole() for one in growing]
    tokens = sum(one.finished.completion_tokens for one in whole if one.finished is not None)
    for prompt, one in zip(PROMPTS, whole, strict=True):
        demo.console.print(literal(f"? {prompt}", "bold"))
        demo.console.print(literal(f"  {' '.join(one.text.split())} …", "dim"))
    elapsed_s = time.monotonic() - started_s
    told = f"{QUESTION} {ANSWER}; then {len(PROMPTS)} texts side by side, {tokens / elapsed_s:.0f} tokens/s together"
    return verdict(demo.console, told, good=ANSWER in text)


def said(text: str) -> Sequence[dict[str, str]]:
    """A conversation that has just begun."""
    return [{"role": "user", "content": text}]
