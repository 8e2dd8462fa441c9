"""A version that generates text: its network, its cache's size, ready and measured. On the model pool's thread."""

from typing import Any, NamedTuple, Protocol, cast

from shared.generation import Vocabulary
from shared.pipeline import Pipeline
from shared.repository import ModelVersion
from workers.backends import torch_backend
from workers.backends.base import LoadFailed, Stages
from workers.backends.torch_device import TorchDevice
from workers.generation.capacity import Capacity, tokens_of
from workers.generation.network import GeneratingNetwork
from workers.generation.runner import GenerationRunner


class Generates(Protocol):
    """What a pipeline with `generates` has besides."""

    context: int
    """Most tokens of prompt and answer together."""

    def vocabulary(self) -> Vocabulary:
        """The bytes of each token, and those that end a text."""


class Place(NamedTuple):
    """Where it is loaded."""

    device: TorchDevice
    budget_bytes: int | None
    """Of the worker's models together."""


def load(version: ModelVersion, pipeline: Pipeline[Any], place: Place, stages: Stages) -> GenerationRunner:
    """Verify, build and place one version. Raises LoadFailed or RepositoryError with one sentence."""
    name = version.name
    if version.config.precision == "fp16":
        raise LoadFailed(f"model {name}: precision is fp16, but text is generated in fp32: remove it")
    network = torch_backend.plain(version, place.device, stages)
    if not isinstance(network, GeneratingNetwork):
        raise LoadFailed(
            f"model {name}: {version.config.network}() gives {type(network).__name__}, which can't generate: it must "
            "be a workers.generation.network.GeneratingNetwork"
        )
    texts = cast("Generates", pipeline)
    vocabulary = texts.vocabulary()
    if texts.context > network.context:
        raise LoadFailed(
            f"model {name}: preprocessing.context is {texts.context}, but its network takes {network.context} tokens"
        )
    if len(vocabulary) > network.vocabulary_size:
        raise LoadFailed(
            f"model {name}: its tokenizer has {len(vocabulary)} tokens, its network {network.vocabulary_size}"
        )
    wanted = version.config.generation
    tokens = tokens_of(
        wanted.cache_tokens, wanted.max_sequences, texts.context, network.token_bytes, place.budget_bytes
    )
    capacity = Capacity(min(wanted.max_sequences, tokens), tokens, texts.context)
    if place.device.streams is not None:
        place.device.streams.settle()  # the weights have come over another queue than those that steps use
    return GenerationRunner(network, vocabulary, place.device, capacity)
