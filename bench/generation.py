"""`make bench-generation`: tokens a second through the whole server, beside the bare loop of the same network.

Bare: one process that reads the prompts together and then takes the likeliest token of each, step by step. The server:
one streaming call per text, all begun at the same moment. Both in turn in each round, while the other one is idle; the
figure is the server's rate divided by the bare loop's of the same round.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

from bench.contestants import ROOT, headrace
from bench.generation_report import Run, page
from headrace import zoo
from headrace.client import Client
from shared.pipeline import RawInput
from shared.pipeline_loader import load_object, load_pipeline
from shared.pipelines.text_generation import TextGeneration
from shared.repository import ModelVersion, Repository
from workers import host

if TYPE_CHECKING:
    from workers.generation.network import GeneratingNetwork

MODEL = "smollm2-135m"
PAGE = ROOT / "docs" / "benchmarks" / "generation.md"
SEQUENCES = (1, 8)
TOKENS, ROUNDS = 64, 3
LIMIT_S = 300.0
"""For one text: a tenth of the slowest rate that was ever seen."""
PROMPTS = (
    "The river rose slowly during the night, and by morning the lower meadows were under water.",
    "Once upon a time there was a miller who had three sons and a mill that stood beside the stream.",
    "A water wheel turns the energy of a flowing stream into work. The oldest ones that we know of were built",
    "The first thing that he noticed when he came back to the village was that the old bridge had gone.",
    "To bake a good loaf of bread you need flour, water, salt and time. Begin in the evening, when",
    "In the spring the farmers drive their sheep to the hills, where the grass is fresh, and they stay there until",
    "The history of the canal begins in the eighteenth century, when merchants of the town decided that",
    "She opened the letter slowly, as if she knew already what was in it, and read the first line aloud:",
)


def main() -> None:
    """Measure, print the page, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each text (default: %(default)s)")
    parser.add_argument("--no-write", action="store_true", help="only print")
    given = parser.parse_args()
    started_s = time.monotonic()
    host.keep_batch_memory()
    host.prepare_threads(host.cores())  # before anything imports torch, as the conversion of the model does
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        repository = Path(name, "models")
        zoo.fetch(MODEL, repository, cache=ROOT / ".cache")
        version = Repository(repository).open(MODEL)
        bare = _Bare(version)
        with headrace(repository) as server, Client(server.address, timeout_s=LIMIT_S) as client:
            for sequences in SEQUENCES:  # the cache grows with the first texts of each number
                _served(client, sequences, 2)
                bare.run(sequences, 2)
            runs = [
                Run(sequences, *bare.run(sequences, given.tokens), *_served(client, sequences, given.tokens))
                for _ in range(given.rounds)
                for sequences in SEQUENCES
            ]
    words = " ".join(sys.argv[1:])
    command = f"python -m bench.generation {words}" if words else "make bench-generation"
    text = page(runs, given.tokens, command, round(time.monotonic() - started_s))
    print(text)
    if not given.no_write:
        PAGE.write_text(text)


class _Bare:
    """The network alone in this process; it has the threads and the allocator of a worker."""

    def __init__(self, version: ModelVersion) -> None:
        import torch  # noqa: PLC0415 - only after the settings in `main`

        from workers.backends import weights  # noqa: PLC0415 - imports torch

        torch.set_num_threads(host.cores())
        self._torch = torch
        pipeline = cast("TextGeneration", load_pipeline(version, torch_allowed=True))
        network: GeneratingNetwork = load_object(version.config.network or "", version.folder, version.name)()
        weights.fill(network, version.files / "model.safetensors", version.name)
        self._network = network.eval().requires_grad_(requires_grad=False)
        options = pipeline.parse_options({})
        self._prompts = [
            cast("list[int]", pipeline.preprocess(RawInput(kind="text", data=text.encode()), options, []).tensors[0][0])
            for text in PROMPTS
        ]

    def run(self, sequences: int, tokens: int) -> tuple[float, float]:
        """Tokens a second of all texts together, and seconds to the first of them."""
        torch = self._torch
        prompts = [torch.tensor(prompt, dtype=torch.int64) for prompt in self._prompts[:sequences]]
        started_s = time.perf_counter()
        with torch.inference_mode():
            counts = torch.tensor([len(prompt) for prompt in prompts])
            new = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
            state = self._network.new_state(sequences, int(counts.max()) + tokens)
            lengths, first_s = torch.zeros_like(counts), 0.0
            for step in range(tokens):
                new = self._network.extend(new, counts, lengths, state, 0).argmax(1, keepdim=True)
                new.tolist()  # as whoever reads along
                first_s = first_s or time.perf_counter() - started_s
                lengths = lengths + counts
                counts = torch.ones_like(counts) if step == 0 else counts
        return sequences * tokens / (time.perf_counter() - started_s), first_s


def _served(client: Client, sequences: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of all texts together, and seconds to the first piece of a text, the median of them."""
    together = threading.Barrier(sequences + 1)

    def one(prompt: str) -> tuple[int, float]:
        together.wait(LIMIT_S)
        started_s = time.perf_counter()
        text = client.generate(prompt, model=MODEL, max_tokens=tokens)
        next(text, None)
        first_s = time.perf_counter() - started_s
        finished = text.whole().finished
        return (finished.completion_tokens if finished else 0), first_s

    with ThreadPoolExecutor(sequences) as threads:
        answers = [threads.submit(one, prompt) for prompt in PROMPTS[:sequences]]
        together.wait(LIMIT_S)
        started_s = time.perf_counter()
        said: Sequence[tuple[int, float]] = [answer.result() for answer in answers]
        seconds = time.perf_counter() - started_s
    return sum(count for count, _ in said) / seconds, median(first_s for _, first_s in said)


if __name__ == "__main__":
    main()
