"""`make bench-texts`: what it is worth that texts of like length share a batch, and what the server costs beside that.

Texts of a long-tailed mix of lengths, most of them short, as vectors of all-MiniLM-L6-v2 in float32 on the CPU. In
turns:

- bare loops over all texts in batches of 32, by the worker's own code in one process: every row padded to the model's
  256 tokens; rows in the order of arrival, padded to the longest of their batch; rows sorted into the server's lengths
  beforehand, which no server could;
- the server over one stream, with its lengths and with a single one, so that any two texts may share a batch.

A loop has its tokens ready; the server also gets text over the network and tokenises it.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench.contestants import ROOT, headrace
from headrace import zoo
from headrace.client import Client
from shared.pipeline import RawInput
from shared.pipeline_loader import load_pipeline
from shared.pipelines.text_embedding import TextEmbedding
from shared.repository import Repository
from shared.tensors import Array

MODEL, UNSORTED = "all-minilm-l6-v2", "one-length"
PAGE = ROOT / "docs" / "benchmarks" / "text_lengths.md"
TEXTS, ROUNDS, ROWS, IN_FLIGHT = 600, 3, 32, 192
MEDIAN_WORDS, SPREAD, MOST_WORDS = 14.0, 1.0, 240
"""Of a log-normal distribution: half of the texts have up to 14 words, one in twenty over 70."""
LIMIT_S = 300.0
"""For one text of many in flight: far above what all of them take."""


class Way(NamedTuple):
    """One way to compute them all."""

    name: str
    told: str


LOOPS = (
    Way("global", "bare loop, every row padded to 256"),
    Way("arrival", "bare loop, in order of arrival, padded to the longest"),
    Way("sorted", "bare loop, sorted into lengths beforehand"),
)
SERVERS = (Way("single", "server, one length for all"), Way("own", "server, its own lengths"))


def texts(count: int) -> list[str]:
    """The same ones each time: words of a model's vocabulary are common ones, so that a word is about a token."""
    chance = random.Random(7)  # noqa: S311 - no secret
    words = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8").lower().split()
    plain = [word for word in words if word.isalpha()]
    lengths = (
        min(MOST_WORDS, max(2, round(chance.lognormvariate(np.log(MEDIAN_WORDS), SPREAD)))) for _ in range(count)
    )
    return [" ".join(chance.choices(plain, k=length)) for length in lengths]


# ------------------------------------------------------------------ bare loops, in a process of their own


def bare(repository: Path, count: int) -> dict[str, Any]:
    """Texts a second and padding of each loop."""
    from workers import host  # noqa: PLC0415 - the worker's code only where it is measured

    host.keep_batch_memory()
    host.prepare_threads(host.cores())
    from workers.backends import torch_backend, torch_device  # noqa: PLC0415 - torch, only after the settings above

    version = Repository(repository).open(MODEL)
    pipeline = load_pipeline(version, torch_allowed=True)
    if not isinstance(pipeline, TextEmbedding):
        raise TypeError(f"{MODEL} is no model of vectors")
    runner = torch_backend.load(version, pipeline, torch_device.find("cpu", 0, host.cores()), "fp32")
    rows = [_tokens(pipeline, text) for text in texts(count)]
    batches = {
        "global": list(_in_turn([_filled(row, pipeline.lengths[-1]) for row in rows])),
        "arrival": list(_in_turn(rows)),
        "sorted": [
            batch
            for length in pipeline.lengths
            for batch in _in_turn([row for row in rows if pipeline.bucket([row.shape]) == (length,)])
        ],
    }
    real = sum(row.size for row in rows)
    found: dict[str, Any] = {"tokens": real, "lengths": sorted(row.shape[1] for row in rows)}
    for way in LOOPS:
        runner.run([[row] for row in batches[way.name][0]], ROWS, "fp32")
        started_s = time.perf_counter()
        for batch in batches[way.name]:
            runner.run([[row] for row in batch], len(batch), "fp32")
        seconds = time.perf_counter() - started_s
        computed = sum(len(batch) * max(row.shape[1] for row in batch) for batch in batches[way.name])
        found[way.name] = {"rate": count / seconds, "padding": computed / real - 1}
    return found


def _tokens(pipeline: TextEmbedding, text: str) -> Array:
    item = RawInput(kind="text", data=text.encode())
    return pipeline.preprocess(item, pipeline.parse_options({}), []).tensors[0]


def _filled(row: Array, length: int) -> Array:
    whole = np.full((1, length), -1, np.int32)
    whole[:, : row.shape[1]] = row
    return whole


def _in_turn(rows: Sequence[Array]) -> Iterator[Sequence[Array]]:
    return (rows[first : first + ROWS] for first in range(0, len(rows), ROWS))


# ------------------------------------------------------------------ the server


def repository(folder: Path) -> Path:
    """The model with its own lengths, and once more with a single one."""
    root = folder / "models"
    zoo.fetch(MODEL, root, cache=zoo.cache_of(ROOT / "models"))
    shutil.copytree(root / MODEL, root / UNSORTED)
    config = root / UNSORTED / "model.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("preprocessing:", "preprocessing:\n  lengths: [256]"))
    return root


def through(address: str, model: str, given: Sequence[str]) -> dict[str, float]:
    """Texts a second over one stream, and the mean rows of the batch that a text was in."""
    with Client(address, timeout_s=LIMIT_S) as client:
        started_s = time.perf_counter()
        outcomes = list(client.embed_many(given, model=model, in_flight=IN_FLIGHT))
        seconds = time.perf_counter() - started_s
    failed = [outcome.error for outcome in outcomes if outcome.result is None]
    if failed:
        raise SystemExit(f"{len(failed)} texts failed: {failed[0]}")
    rows = [outcome.result.server_timing.batch_rows for outcome in outcomes if outcome.result is not None]
    return {"rate": len(given) / seconds, "rows": sum(rows) / len(rows)}


# ------------------------------------------------------------------ the page


def page(rounds: list[dict[str, Any]], count: int, facts: str) -> str:
    """Medians of all rounds; ratios are of the same round."""
    tokens = rounds[0]["lengths"]
    mix = (
        f"{count} texts of {rounds[0]['tokens']} tokens: half have up to {tokens[count // 2]}, one in twenty over "
        f"{tokens[-count // 20]}, the longest {tokens[-1]}. *Padding* is what was computed beyond that. The ratio is "
        "to the sorted loop of the same round."
    )
    lines = [
        "# Texts of different lengths",
        "",
        f"Made by `make bench-texts`; median of {len(rounds)} round(s), {facts}.",
        "",
        *(__doc__ or "").strip().splitlines()[2:],
        "",
        mix,
        "",
        "| | texts a second | padding | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for way in (*LOOPS, *SERVERS):
        rate = median(each[way.name]["rate"] for each in rounds)
        ratio = median(each[way.name]["rate"] / each["sorted"]["rate"] for each in rounds)
        padding = f"{rounds[0][way.name]['padding'] * 100:.0f} %" if way in LOOPS else ""
        lines.append(f"| {way.told} | {rate:.1f} | {padding} | {ratio:.2f} × |")
    rows = (f"{median(each[way.name]['rows'] for each in rounds):.1f} {way.told.partition(', ')[2]}" for way in SERVERS)
    lines += ["", f"Mean rows of the batch that a text was in: {'; '.join(rows)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure in turns, print, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--texts", type=int, default=TEXTS, help="default: %(default)s")
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.bare:
        print(json.dumps(bare(asked.bare, asked.texts)))
        return
    given, rounds = texts(asked.texts), []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = repository(Path(folder))
        command = [sys.executable, "-m", "bench.text_lengths", "--bare", str(root), "--texts", str(asked.texts)]
        with headrace(root) as server:
            for model in (MODEL, UNSORTED):
                through(server.address, model, given[:ROWS])
            for _ in range(asked.rounds):
                done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
                found = json.loads(done.stdout.splitlines()[-1])
                for way, model in zip(SERVERS, (UNSORTED, MODEL), strict=True):
                    found[way.name] = through(server.address, model, given)
                rounds.append(found)
                print({name: value for name, value in found.items() if name != "lengths"}, file=sys.stderr)
    from bench.cpu_forward import machine  # noqa: PLC0415 - imports torch, after all is measured

    text = page(rounds, asked.texts, machine())
    print(text)
    if not asked.no_write:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
