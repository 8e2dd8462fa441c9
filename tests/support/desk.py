"""A stepper around a tiny network, and what its texts came to."""

import string
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from shared.clock import FOREVER_S
from shared.generation import GenerationOptions, Vocabulary
from shared.generation_messages import Piece
from shared.messages import Failure
from shared.model_messages import GenerationLimits
from shared.results import TextEnd, Token
from tests.support.tiny_llama import ENDS, TinyLlama
from tests.support.worker_parts import TOY, ToyPipeline
from workers.backends.torch_device import TorchDevice
from workers.generation.capacity import Capacity
from workers.generation.network import GeneratingNetwork
from workers.generation.runner import GenerationRunner
from workers.generation.stepper import Stepper
from workers.jobs import Job
from workers.loaded import LoadedVersion

LETTERS = string.ascii_letters + string.digits
"""Token i is the i-th of these; the last two of 64 are half a character, and the end."""
PIECES = [*(letter.encode() for letter in LETTERS), b"\xc3", b""]
VOCABULARY = Vocabulary(PIECES, [ENDS])
CPU = TorchDevice(torch.device("cpu"))
OWNER = "gateway"


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


class Outcome:
    """What one job has got so far."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[Token] = []
        self.end: TextEnd | None = None
        self.failure: Failure | None = None
        self.pieces = 0
        self.count = 0
        """Tokens, as its newest piece says."""

    def add(self, piece: Piece) -> None:
        """Raises AssertionError where something follows the last piece, or a piece says nothing."""
        assert self.end is None, "a piece after the end"
        assert self.failure is None, "a piece after the failure"
        assert piece.text or piece.tokens or piece.end or piece.failure, "a piece that says nothing"
        assert not (piece.end and piece.failure)
        self.text += piece.text
        self.tokens += piece.tokens
        self.end, self.failure = piece.end, piece.failure
        self.pieces += 1
        self.count = piece.count or self.count

    @property
    def over(self) -> bool:
        """Whether its last piece has come."""
        return self.end is not None or self.failure is not None

    @property
    def ids(self) -> list[int]:
        """Of its tokens; only where log probabilities were asked for."""
        return [token.id for token in self.tokens]

    def __repr__(self) -> str:
        return f"<Outcome {self.text!r} {self.end} {self.failure}>"


class Desk:
    """Gives jobs to a stepper and collects what it says."""

    def __init__(
        self,
        network: GeneratingNetwork | None = None,
        capacity: Capacity | None = None,
        *,
        portion: int = 8,
        vocabulary: Vocabulary = VOCABULARY,
        device: TorchDevice = CPU,
    ) -> None:
        """`portion`: tokens of prompts read per step; 16 is the least that a stepper allows itself, so it is set."""
        self.network = network or TinyLlama()
        self.capacity = capacity or Capacity(8, 8 * self.network.context, self.network.context)
        self.runner = GenerationRunner(self.network, vocabulary, device, self.capacity)
        self.runner.limits = GenerationLimits(self.capacity.sequences, self.capacity.tokens, 0.01, 0.001)
        self.loaded = LoadedVersion(TOY, self.runner, ToyPipeline(), [])
        self.clock = Clock()
        self.stepper = Stepper(self.loaded, self.runner, self.clock)
        self.stepper._portion = portion
        self.outcomes: dict[tuple[Hashable, int], Outcome] = {}
        self._next = 0

    def ask(
        self,
        prompt: Sequence[int],
        *,
        owner: Hashable = OWNER,
        deadline_s: float = FOREVER_S,
        **options: Any,  # noqa: ANN401 - each its own
    ) -> Outcome:
        """Begin a job; its outcome fills up as steps are made. Raises Refused."""
        self._next += 1
        self.stepper.add(Job(owner, self._next, deadline_s, list(prompt), GenerationOptions(**options)))
        return self.outcomes.setdefault((owner, self._next), Outcome())

    def cancel(self, outcome: Outcome) -> None:
        """Its caller has left."""
        ((owner, number),) = (key for key, each in self.outcomes.items() if each is outcome)
        self.stepper.cancel(owner, [number])

    def step(self, count: int = 1) -> None:
        """Make so many steps."""
        for _ in range(count):
            for owner, pieces in self.stepper.step().items():
                assert len({piece.job for piece in pieces}) == len(pieces), "one piece per job and step"
                for piece in pieces:
                    self.outcomes[owner, piece.job].add(piece)

    def finish(self, limit: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not len(self.stepper):
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.stepper}")

    def alone(self, prompt: Sequence[int], **options: Any) -> Outcome:  # noqa: ANN401 - each its own
        """The same network's answer to one prompt, with nobody beside it."""
        desk = Desk(self.network, self.capacity)
        outcome = desk.ask(prompt, **options)
        desk.finish()
        return outcome


def text_of(tokens: Sequence[int]) -> str:
    """What tokens mean."""
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")
