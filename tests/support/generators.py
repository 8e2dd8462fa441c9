"""The zoo's generating models, converted once for all test runs and loaded once per process."""

import functools
import hashlib
import shutil
from typing import cast

import torch

from headrace import zoo_generators, zoo_tokenizers, zoo_weights
from shared.pipeline_loader import load_object, load_pipeline
from shared.pipelines.text_generation import TextGeneration
from shared.repository import ModelVersion
from tests.support.source import ROOT
from tests.support.zoo_parts import CACHE, fetched
from workers.backends import weights
from workers.generation.network import GeneratingNetwork

_CONVERTERS = (zoo_generators, zoo_tokenizers, zoo_weights)
_PREFIX = "generators-"


@functools.cache
def version_of(name: str) -> ModelVersion:
    """From the shared cache, as the present converters make it: a conversion takes ten seconds.

    Skips the test where the packages can't be downloaded.
    """
    sources = [(ROOT / f"{module.__name__.replace('.', '/')}.py").read_bytes() for module in _CONVERTERS]
    folder = CACHE / f"{_PREFIX}{hashlib.sha256(b''.join(sources)).hexdigest()[:16]}"
    for other in CACHE.glob(f"{_PREFIX}*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return fetched(name, folder)


@functools.cache
def pipeline_of(name: str) -> TextGeneration:
    """As gateway and pool load it."""
    return cast("TextGeneration", load_pipeline(version_of(name), torch_allowed=False))


@functools.cache
def network_of(name: str) -> GeneratingNetwork:
    """In float32, on the CPU."""
    version = version_of(name)
    network: GeneratingNetwork = load_object(version.config.network or "", version.folder, version.name)()
    weights.fill(network, version.files / "model.safetensors", version.name)
    return network.eval().requires_grad_(requires_grad=False)


def greedy_alone(network: GeneratingNetwork, prompt: list[int], count: int, ends: frozenset[int]) -> list[int]:
    """The reference: one sequence, one token after another, the likeliest each time."""
    said: list[int] = []
    new, length = prompt, 0
    with torch.inference_mode():
        state = network.new_state(1, len(prompt) + count)
        while len(said) < count:
            tokens, counts = torch.tensor([new]), torch.tensor([len(new)])
            token = int(network.extend(tokens, counts, torch.tensor([length]), state, 0).argmax())
            if token in ends:
                break
            said.append(token)
            length += len(new)
            new = [token]
    return said
