"""Texts on a CUDA device: the same as on the CPU, in any company."""

from random import Random

import torch

from tests.support.desk import Desk, text_of
from tests.support.tiny_llama import TinyLlama, greedy
from workers.backends import torch_device
from workers.backends.torch_device import TorchDevice
from workers.generation.capacity import Capacity


def device() -> TorchDevice:
    return torch_device.find("cuda:0", 0, 1)


def test_texts_that_join_and_leave_are_those_of_the_cpu() -> None:
    network = TinyLlama()
    desk = Desk(TinyLlama().cuda(), Capacity(4, 4 * 48, 48), device=device())
    random = Random(3)  # noqa: S311 - not for secrets
    asked = []
    for _ in range(20):
        prompt, count = [random.randrange(60) for _ in range(random.randrange(1, 20))], random.randrange(1, 20)
        asked.append((prompt, count, desk.ask(prompt, max_tokens=count)))
        desk.step(random.randrange(4))
    desk.finish()
    for prompt, count, outcome in asked:
        assert outcome.text == text_of(greedy(network, prompt, count))


def test_seeds_beams_and_penalties_do_not_hang_on_company() -> None:
    desk = Desk(TinyLlama().cuda(), device=device())
    ways = [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "seed": 5, "top_k": 9, "top_p": 0.8},
        {"beams": 3},
        {"repetition_penalty": 1.5, "logprobs": 2},
    ]
    alone = []
    for options in ways:
        outcome = desk.ask([1, 2, 3], max_tokens=20, **options)
        desk.finish()
        alone.append(outcome.text)
    together = [desk.ask([1, 2, 3], max_tokens=20, **options) for options in ways]
    desk.finish()
    assert [outcome.text for outcome in together] == alone


def test_warm_up_measures_and_gives_its_memory_back() -> None:
    desk = Desk(TinyLlama().cuda(), device=device())
    before = torch.cuda.memory_allocated()
    limits = desk.runner.warm_up("tiny", lambda: False, lambda _: None)
    assert limits.step_s > 0
    assert torch.cuda.memory_allocated() == before
