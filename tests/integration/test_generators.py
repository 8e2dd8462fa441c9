"""The zoo's generating models: what they are known to say, alone and in changing company."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import cast

import pytest
import torch

from headrace import zoo
from shared.pipeline import RawInput
from shared.pipelines.text_generation import TextGeneration
from shared.results import FinishReason
from tests.support.desk import Desk, Outcome
from tests.support.generators import greedy_alone, network_of, pipeline_of
from workers.generation.capacity import Capacity
from workers.networks.llama import Llama

SMOL, TITLES = "smollm2-135m", "textgenrnn"
CHAT = [["user", "What is the capital of France?"]]
PROSE = (
    "The river rose slowly during the night, and by morning the lower meadows were under water. The farmers had moved "
    "their sheep to the hill the day before, because the old people in the village had told them that the spring rain "
    "would come early this year. Nobody was surprised, and nobody was hurt."
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two that wait for each other take many times as long where other tests want the cores as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _tokens(pipeline: TextGeneration, item: RawInput) -> list[int]:
    return cast("list[int]", pipeline.preprocess(item, pipeline.parse_options({}), []).tensors[0][0].tolist())


def _text(pipeline: TextGeneration, text: str) -> list[int]:
    return _tokens(pipeline, RawInput(kind="text", data=text.encode()))


def _desk(name: str, sequences: int = 4, tokens: int = 2048) -> Desk:
    network = network_of(name)
    capacity = Capacity(sequences, tokens, network.context)
    return Desk(network, capacity, portion=32, vocabulary=pipeline_of(name).vocabulary())


def _said(name: str, prompt: list[int], **options: object) -> Outcome:
    desk = _desk(name)
    outcome = desk.ask(prompt, **options)
    with torch.inference_mode():
        desk.finish()
    return outcome


def test_smollm2_knows_the_capital_of_france() -> None:
    prompt = _tokens(pipeline_of(SMOL), RawInput(kind="chat", data=json.dumps(CHAT).encode()))
    outcome = _said(SMOL, prompt, max_tokens=20)
    assert outcome.text == "The capital of France is Paris."
    assert outcome.end is not None
    assert (outcome.end.reason, outcome.end.prompt_tokens, outcome.end.completion_tokens) == (
        FinishReason.END_TOKEN,
        37,
        8,
    )


def test_smollm2_with_its_cache_and_without_it() -> None:
    network = cast("Llama", network_of(SMOL))
    tokens = _text(pipeline_of(SMOL), PROSE)[:24]
    with torch.inference_mode():
        state = network.new_state(1, 32)
        for start, stop in ((0, 17), (17, 23), (23, 24)):
            new = torch.tensor([tokens[start:stop]])
            logits = network.extend(new, torch.tensor([stop - start]), torch.tensor([start]), state, 0)
        drift = (logits[0] - network(torch.tensor([tokens]))[0, -1]).abs().max()
    assert drift < 1e-4, f"{drift:.1e} of logits of some 10"


def test_smollm2_expects_prose_and_not_its_words_in_disorder() -> None:
    pipeline, network = pipeline_of(SMOL), network_of(SMOL)
    words = PROSE.split()
    random.Random(1).shuffle(words)  # noqa: S311 - no secret
    losses = []
    for text in (PROSE, " ".join(words)):
        tokens = torch.tensor([_text(pipeline, text)])
        with torch.inference_mode():
            expected = network(tokens)[0, :-1].log_softmax(-1)
        losses.append(-expected.gather(1, tokens[0, 1:, None]).mean().item())
    assert losses == pytest.approx(list(zoo.MODELS[SMOL].metrics.values()), abs=0.02)


def test_textgenrnn_expects_prose_and_not_its_words_in_disorder() -> None:
    pipeline, network = pipeline_of(TITLES), network_of(TITLES)
    words = PROSE.split()
    random.Random(1).shuffle(words)  # noqa: S311 - no secret
    losses = []
    for text in (PROSE, " ".join(words)):
        tokens, loss = _text(pipeline, text), 0.0
        with torch.inference_mode():
            state = network.new_state(1, 1024)
            for place, (token, following) in enumerate(itertools.pairwise(tokens)):
                counts, lengths = torch.tensor([1]), torch.tensor([place])
                logits = network.extend(torch.tensor([[token]]), counts, lengths, state, 0)
                loss -= logits[0].log_softmax(-1)[following].item()
        losses.append(loss / (len(tokens) - 1))
    metrics = zoo.MODELS[TITLES].metrics
    told = [metrics["nll_per_character_prose"], metrics["nll_per_character_shuffled_words"]]
    assert losses == pytest.approx(told, abs=0.01)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "[Specific] Can someone please remove the state of the state of the state of the "),
        ("The ", "state of the state of the state of the state of the state of the state of the st"),
    ],
)
def test_textgenrnn_goes_in_circles(prompt: str, said: str) -> None:
    """As its authors' own code does with temperature 0; the token in front of each title is the tokenizer's."""
    tokens = _text(pipeline_of(TITLES), prompt) if prompt else [464]
    outcome = _said(TITLES, tokens, max_tokens=80)
    assert outcome.text == said
    assert outcome.end is not None
    assert outcome.end.reason is FinishReason.LENGTH


def test_a_penalty_for_repetition_leads_out_of_the_circle() -> None:
    outcome = _said(TITLES, _text(pipeline_of(TITLES), "The "), max_tokens=80, repetition_penalty=1.3)
    assert "state of the state" not in outcome.text


def test_a_stop_string_ends_a_real_text_before_it() -> None:
    outcome = _said(TITLES, _text(pipeline_of(TITLES), "The "), max_tokens=80, stop=("the state",))
    assert outcome.text == "state of "
    assert outcome.end is not None
    assert outcome.end.reason is FinishReason.STOP_STRING


def _mixed(name: str, prompts: list[list[int]], counts: list[int], seed: int) -> None:
    """Ask at random times, let some leave before their end, and compare each text with the same one made alone."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    network, vocabulary = network_of(name), pipeline_of(name).vocabulary()
    desk = _desk(name)
    asked: list[Outcome] = []
    leavers = set(chance.sample(range(len(prompts)), k=len(prompts) // 4))
    at_once = 0
    with torch.inference_mode():
        while len(asked) < len(prompts) or len(desk.stepper):
            if len(asked) < len(prompts) and (not len(desk.stepper) or chance.random() < 0.5):
                number = len(asked)
                asked.append(desk.ask(prompts[number], max_tokens=counts[number], logprobs=0))
            for number, outcome in enumerate(asked):
                if number in leavers and len(outcome.ids) >= 2 and not outcome.over:
                    desk.cancel(outcome)
            desk.step()
            at_once = max(at_once, desk.stepper.rows)
    assert at_once > 2, "they were never together"
    for number, outcome in enumerate(asked):
        alone = greedy_alone(network, prompts[number], counts[number], vocabulary.end_ids)
        said = [token for token in outcome.ids if token not in vocabulary.end_ids]
        assert said == (alone[: len(said)] if number in leavers else alone), f"text {number} differs in company"


def test_smollm2_says_the_same_alone_and_in_changing_company() -> None:
    pipeline = pipeline_of(SMOL)
    texts = [
        "The river",
        PROSE[:120],
        "1, 2, 3, 4,",
        "Once upon a time there was",
        PROSE[120:290],
        "Paris is",
        "def f(x):",
    ]
    _mixed(SMOL, [_text(pipeline, text) for text in texts], [7, 5, 8, 4, 6, 3, 7], seed=3)


@pytest.mark.parametrize("seed", range(3))
def test_textgenrnn_says_the_same_alone_and_in_changing_company(seed: int) -> None:
    """Prompts shorter and longer than its window."""
    pipeline, chance = pipeline_of(TITLES), random.Random(seed)  # noqa: S311 - no secret
    prompts = [_text(pipeline, PROSE[start : start + chance.randint(1, 90)]) for start in range(0, 120, 10)]
    _mixed(TITLES, prompts, [chance.randint(1, 30) for _ in prompts], seed)
