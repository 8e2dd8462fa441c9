"""Prepared tensors that are kept, so that the same input is not decoded twice. Off unless a budget is set. Pure.

They depend on the input, the request's options and the preprocessing, and not on weights: they outlive a change of
version, and a canary shares them with the current one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gateway.cache import KeyMaker, Store
from shared.model_config import ModelConfig
from shared.tensors import SlotRef, Tensor

_encode = msgspec.json.Encoder(order="deterministic").encode


class Kept(NamedTuple):
    """What a pool process made of one item."""

    tensors: tuple[Tensor, ...]
    """With their bytes inline, never in an arena slot: slots are given back."""
    context: bytes
    """For `postprocess`, encoded."""


def preprocessing_digest(
    config: ModelConfig, own_code: str = "", labels: Sequence[str] = (), files: Sequence[str] = ()
) -> bytes:
    """What decides how an input is prepared: pipeline, its settings and code, the labels, and other files it reads.

    `own_code`: a digest of the user's own pipeline file, empty for a built-in one. Its code is all that is looked at:
    where it imports another file of the model's folder, that file belongs into the digest, too. The labels are in it
    because a pipeline gets them when it is made and may prepare by them; where they stay the same (they do from one
    version to the next) it costs nothing. Precision, batching and network are not: they come after. `files`: a digest
    of each that the pipeline names (`Pipeline.files`), e.g. of its tokeniser.
    """
    maker = KeyMaker("preprocessing")
    maker.text(config.pipeline)
    maker.data(_encode(config.preprocessing))
    maker.text(own_code)
    maker.numbers((len(labels),))
    for label in labels:
        maker.text(label)
    for digest in files:
        maker.text(digest)
    return maker.key()


def prepared_key(preprocessing: bytes, digest: bytes, options: bytes) -> bytes:
    """The key of one item; its digest and the options as in `gateway.cache.key_of`."""
    maker = KeyMaker("prepared")
    maker.data(preprocessing)
    maker.data(options)
    maker.data(digest)
    return maker.key()


class PreparedCache:
    """Prepared items."""

    def __init__(self, budget_bytes: int, ttl_s: float) -> None:
        self.store: Store[Kept] = Store(budget_bytes, ttl_s)
        """With the counters."""

    def get(self, key: bytes, now_s: float) -> Kept | None:
        """What was prepared; to be copied into slots, never changed."""
        return self.store.get(key, now_s)

    def put(self, key: bytes, tensors: Sequence[Tensor], context: bytes, arena: memoryview, now_s: float) -> None:
        """Keep what a pool process made; bytes in arena slots are copied, so it must be called before they go back."""
        kept = tuple(_inline(tensor, arena) for tensor in tensors)
        self.store.put(key, Kept(kept, context), sum(map(_nbytes, kept)) + len(context), now_s)


def _inline(tensor: Tensor, arena: memoryview) -> Tensor:
    place = tensor.data
    data = bytes(arena[place.offset : place.offset + place.nbytes]) if isinstance(place, SlotRef) else place
    return Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of the data, and 200 for the objects around it."""
    return len(tensor.data) + 200 if isinstance(tensor.data, bytes) else 200
