"""Tiny models that generate, on disk for a worker process, and their texts put together."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.torch

from shared.clock import FOREVER_S
from shared.generation import GenerationOptions
from shared.generation_messages import Generate, Generated
from tests.support.desk import Outcome
from tests.support.fake_gateway import FakeGateway
from tests.support.tiny_llama import TinyLlama
from tests.support.worker_parts import toy_model

CONFIG = """
pipeline: texts:Texts
network: {network}
generation: {{max_sequences: {sequences}, cache_tokens: {tokens}}}
"""
PIPELINE = """
from pathlib import Path

from shared.pipeline import Pipeline, PipelineSpec, Prepared
from shared.tensors import TensorSpec


class Texts(Pipeline):
    generates = True
    context = CONTEXT

    def vocabulary(self):
        from tests.support.desk import VOCABULARY

        return VOCABULARY

    @property
    def spec(self):
        tokens = TensorSpec(name="tokens", datatype="INT32", shape=(-1,))
        return PipelineSpec(kind="text", inputs=(tokens,), outputs=(tokens,))

    def preprocess(self, item, options, out):
        return Prepared([])

    def postprocess(self, outputs, context, options):
        return []

    def example(self):
        return None
"""


def generating(
    folder: Path,
    name: str = "texts",
    *,
    network: str = "tests.support.tiny_llama:TinyLlama",
    sequences: int = 4,
    tokens: int = 192,
    context: int = 48,
) -> str:
    """A model in `folder`/models; its version."""
    weights = safetensors.torch.save(TinyLlama().state_dict())
    config = CONFIG.format(network=network, sequences=sequences, tokens=tokens)
    code = PIPELINE.replace("CONTEXT", str(context))
    return toy_model(folder / "models", name, config, {"w.safetensors": weights}, texts=code).version


def generate(job: int, prompt: list[int], *, model: int = 1, deadline_s: float = FOREVER_S, **options: Any) -> Generate:  # noqa: ANN401 - each its own
    """A prompt as a gateway sends it."""
    packed = msgspec.msgpack.encode(GenerationOptions(**options))
    return Generate(job, model, deadline_s, np.array(prompt, "<i4").tobytes(), packed)


def outcomes(gateway: FakeGateway) -> dict[int, Outcome]:
    """What every job has got so far. Raises AssertionError where a piece follows the last one."""
    found: dict[int, Outcome] = {}
    for message in gateway.received:
        if isinstance(message, Generated):
            for piece in message.pieces:
                found.setdefault(piece.job, Outcome()).add(piece)
    return found


async def over(gateway: FakeGateway, *jobs: int) -> dict[int, Outcome]:
    """The outcomes, once these jobs are at their end."""

    def done() -> bool:
        found = outcomes(gateway)
        return all(job in found and found[job].over for job in jobs)

    await gateway.until(done, f"the ends of {jobs}")
    return outcomes(gateway)
