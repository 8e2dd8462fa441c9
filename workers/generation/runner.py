"""A network that generates, its state, and the device: extends rows, and says what its errors mean. Worker only."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shared.clock import now_s
from shared.generation import Vocabulary
from shared.model_messages import GenerationLimits
from workers.backends import footprint
from workers.backends.base import Forward, LoadFailed, OutOfMemory, Precision, Runner
from workers.backends.torch_device import TorchDevice
from workers.generation.capacity import Capacity
from workers.generation.network import GeneratingNetwork, State
from workers.generation.sequences import Reader
from workers.staging import Inputs

WARM_TOKENS = 64
"""Of the prompts that warm-up reads: enough to measure a token of them."""


class Feed(NamedTuple):
    """What one row is extended by."""

    tokens: Sequence[int]
    """1 or more."""
    length: int
    """Tokens that it has."""


class GenerationRunner(Runner):
    """One loaded version that generates. In float32: a token that differs changes all that follow.

    Once loaded it is used by the worker's loop alone.
    """

    precision: Precision = "fp32"
    pads = False

    def __init__(
        self, network: GeneratingNetwork, vocabulary: Vocabulary, device: TorchDevice, capacity: Capacity
    ) -> None:
        self.capacity = capacity
        self.reader = Reader(vocabulary, capacity.context, network.vocabulary_size, device.device)
        self.limits = GenerationLimits(capacity.sequences, capacity.tokens, 0.0, 0.0)
        """As measured by `warm_up`."""
        self._network = network
        self._device = device
        self._room = (0, 0)
        self._state: State | None = None
        self.weigh()

    def weigh(self) -> None:
        """The cache counts as a whole: it may grow to that at any time."""
        cache = self.capacity.tokens * self._network.token_bytes
        self.memory_bytes = footprint.of(self._network, self._device.device) + cache

    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:
        """Never: gateways send no batches to what generates."""
        raise NotImplementedError("a model that generates text has no batches")

    # ------------------------------------------------------------ the loop's

    def make_room(self, rows: int, longest: int) -> None:
        """For so many rows, each of at most so many tokens. Raises OutOfMemory, DeviceLost."""
        if rows <= self._room[0] and longest <= self._room[1]:
            return
        room = self.capacity.room(rows, longest)
        with self.judged():
            if self._state is None:
                self._state = self._network.new_state(*room)
            else:
                self._state.grow(*room)
        self._room = room

    def keep(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was. Raises OutOfMemory, DeviceLost."""
        if self._state is not None:
            with self.judged():
                self._state.keep(rows)

    def extend(self, first_row: int, feeds: Sequence[Feed]) -> Tensor:
        """Float32 logits `[rows, vocabulary]` on the device. Raises OutOfMemory, DeviceLost, or as the network."""
        width = max(len(feed.tokens) for feed in feeds)
        tokens = [[*feed.tokens, *[0] * (width - len(feed.tokens))] for feed in feeds]
        device = self._device.device
        with self.judged():
            if self._state is None:
                raise RuntimeError("there is no room for any row")
            logits = self._network.extend(
                torch.tensor(tokens, device=device),
                torch.tensor([len(feed.tokens) for feed in feeds], device=device),
                torch.tensor([feed.length for feed in feeds], device=device),
                self._state,
                first_row,
            )
            if logits.shape != (len(feeds), self.reader.vocabulary_size):
                raise RuntimeError(f"the network gives logits {list(logits.shape)} for {len(feeds)} rows")
            return logits.float()

    def drop(self) -> None:
        """Forget all rows, and give their memory back."""
        self._state, self._room = None, (0, 0)

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
        """Turns what is raised inside into OutOfMemory or DeviceLost where it means that. No gradients inside."""
        with self._device.judged(), torch.inference_mode():
            yield

    # ------------------------------------------------------------ the loader's

    def warm_up(self, name: str, stopping: Callable[[], bool], give_way: Callable[[float], None]) -> GenerationLimits:
        """Run prompts and steps of one row and of all, so that no caller pays for a first time; measure them.

        Raises LoadFailed, DeviceLost, or what the network raises.
        """
        capacity, seconds = self.capacity, dict[tuple[int, int], float]()
        length = max(1, min(WARM_TOKENS, capacity.context - 1, capacity.tokens // capacity.sequences - 1))
        try:
            self.make_room(capacity.sequences, length + 1)
            for rows, count, known in ((1, length, 0), (1, 1, length), (capacity.sequences, 1, length)):
                for _ in range(2):  # the first time is warm-up's own
                    if stopping():
                        raise LoadFailed(f"model {name}: the worker stops")
                    seconds[rows, count] = self._timed(rows, count, known, give_way)
        except OutOfMemory:
            raise LoadFailed(
                f"model {name}: {capacity.sequences} sequence(s) do not fit the device's memory: "
                "lower generation.max_sequences in model.yaml"
            ) from None
        self.drop()
        step_s, prefill_s = seconds[capacity.sequences, 1], seconds[1, length] / length
        self.limits = GenerationLimits(capacity.sequences, capacity.tokens, step_s, prefill_s)
        return self.limits

    def _timed(self, rows: int, count: int, length: int, give_way: Callable[[float], None]) -> float:
        started_s = now_s()
        logits = self.extend(0, [Feed([0] * count, length)] * rows)
        logits.argmax(-1).tolist()  # waits for the device
        seconds = now_s() - started_s
        give_way(seconds)
        return seconds

    def __repr__(self) -> str:
        return f"<GenerationRunner {self.capacity} room={self._room}>"
