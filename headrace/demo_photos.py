"""The demo's first part: 20 photos with their true classes."""

import time

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.client_results import Classified, Outcome
from headrace.demo_tasks import Demo, verdict
from headrace.many_inputs import reason_of
from headrace.output import literal
from headrace.zoo import DEFAULT_MODEL
from headrace.zoo_samples import Photo, fetch_photos
from shared.repository import Repository

ENOUGH = 17
"""Right top-1 answers of 20. Two of the photos carry labels that every known model contradicts."""


def classify(demo: Demo) -> bool:
    """Photos beside their true labels."""
    photos = fetch_photos(demo.samples)
    started_s = time.monotonic()
    found = list(demo.client.classify_many([photo.path for photo in photos], top_k=5, model=DEFAULT_MODEL))
    elapsed_s = time.monotonic() - started_s
    labels = Repository(demo.repository).open(DEFAULT_MODEL).labels()
    outcomes = sorted(found, key=lambda outcome: outcome.index)
    return report(demo.console, photos, outcomes, labels, elapsed_s)


def report(
    console: Console,
    photos: list[Photo],
    outcomes: list[Outcome[Classified]],
    labels: tuple[str, ...],
    elapsed_s: float,
) -> bool:
    """Print the table and the sum. Returns whether at least `ENOUGH` top-1 answers are right."""
    wide = console.width >= 120
    table = Table(box=SIMPLE_HEAD, title="ImageNet photos; times in ms", title_justify="left", padding=(0, 1, 0, 0))
    for heading in ("photo", "true label", "top-1", "top-5"):
        table.add_column(heading, overflow="fold")
    for heading in ("prepare", "queue", "run", "rows"):
        table.add_column(heading, justify="right")
    first_right = among_five = 0
    for photo, outcome in zip(photos, outcomes, strict=True):
        number = photo.path.stem.split("_")[1]
        truth = labels[photo.label] if photo.label < len(labels) else str(photo.label)
        if outcome.result is None:
            table.add_row(number, literal(truth), literal(f"✗ {reason_of(outcome.error)}", "red"))
            continue
        indices = [label.index for label in outcome.result.labels]
        first_right += indices[0] == photo.label
        among_five += photo.label in indices
        answer = _answer(outcome.result, photo.label, wide=wide)
        table.add_row(number, literal(truth), *answer, *_times(outcome.result))
    console.print(table)
    told = (
        f"top-1 {first_right} of {len(photos)} right ({ENOUGH} are enough), top-5 {among_five}; "
        f"{len(photos)} photos in {elapsed_s:.2f} s"
    )
    return verdict(console, told, good=first_right >= ENOUGH)


def _answer(result: Classified, truth: int, *, wide: bool) -> tuple[Text, Text]:
    """The cells for top-1 and top-5: the best class where it is wrong, and at which place the true one is."""
    indices = [label.index for label in result.labels]
    score = f"{result.top.score * 100:.0f} %"
    right = result.top.index == truth
    first = f"{score}" if right and not wide else f"{result.top.name} {score}"
    place = f"{indices.index(truth) + 1}." if truth in indices else ""
    names = ", ".join(label.name for label in result.labels[1:]) if wide else ""
    return _marked(first, good=right), _marked(f"{place} {names}".strip(), good=truth in indices)


def _times(result: Classified) -> tuple[str, str, str, str]:
    """Milliseconds to prepare, to wait for a process, slot or company, to run; and the rows of the batch."""
    timing = result.server_timing
    queue_ms = timing.admit_ms + timing.wait_ms + timing.batch_ms
    run_ms = timing.copy_ms + timing.run_ms + timing.finish_ms
    return f"{timing.prepare_ms:.1f}", f"{queue_ms:.1f}", f"{run_ms:.1f}", str(timing.batch_rows)


def _marked(text: str, *, good: bool) -> Text:
    return literal(f"{'✓' if good else '✗'} {text}".strip(), "green" if good else "red")
