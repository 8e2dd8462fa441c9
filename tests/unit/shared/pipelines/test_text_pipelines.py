"""The pipelines of texts, each around a small real network: batches of mixed lengths answer as single texts do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidInput, InvalidOption, StartupError
from shared.pipeline import Pipeline, RawInput
from shared.pipelines.text_classification import TextClassification, TextClassificationConfig
from shared.pipelines.text_embedding import TextEmbedding, TextEmbeddingConfig
from shared.pipelines.token_classification import (
    Part,
    TokenClassification,
    TokenClassificationConfig,
    together,
)
from shared.results import Classification, Embedding, Entities, Result
from shared.tensors import Array
from tests.support import text_parts
from tests.support.fake_streams import FakeDevice, FakeStreams
from tests.support.text_parts import TEXTS, write_tokeniser
from workers.backends.base import Runner
from workers.backends.stream_runner import StreamRunner
from workers.backends.torch_device import find
from workers.backends.torch_runner import TorchRunner

LABELS = ("toxic", "kind", "neutral")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    write_tokeniser(path)
    return path


def embedding(folder: Path, **config: object) -> TextEmbedding:
    return TextEmbedding(msgspec.convert({"max_tokens": 64, **config}, TextEmbeddingConfig), folder, ())


def classification(folder: Path, **config: object) -> TextClassification:
    return TextClassification(msgspec.convert({"max_tokens": 64, **config}, TextClassificationConfig), folder, LABELS)


def tagging(folder: Path, labels: tuple[str, ...] = TAGS, **config: object) -> TokenClassification:
    return TokenClassification(msgspec.convert({"max_tokens": 64, **config}, TokenClassificationConfig), folder, labels)


def on_cpu(network: torch.nn.Module, pipeline: Pipeline[Any]) -> Runner:
    return TorchRunner(network, pipeline, find("cpu", 0, 1), "fp32")


def on_streams(network: torch.nn.Module, pipeline: Pipeline[Any]) -> Runner:
    return StreamRunner(network, pipeline, FakeDevice(FakeStreams()), "fp32")


Place = Callable[[torch.nn.Module, Pipeline[Any]], Runner]
PLACES = pytest.mark.parametrize("place", [on_cpu, on_streams])


def answers(pipeline: Pipeline[Any], runner: Runner, texts: tuple[str, ...], **options: object) -> list[Result]:
    """All texts in one batch, as the server would answer them."""
    asked = pipeline.parse_options(options)
    prepared = [pipeline.preprocess(RawInput(kind="text", data=text.encode()), asked, []) for text in texts]
    forward = runner.run([each.tensors for each in prepared], len(texts), "fp32")
    assert forward.finite.all()
    found: list[Result] = []
    for number, each in enumerate(prepared):
        outputs: list[Array] = [output[number : number + 1].copy() for output in forward.outputs]
        found += pipeline.postprocess(outputs, each.context, asked)
    return found


def vectors(results: list[Result]) -> Array:
    return np.array([result.values for result in results if isinstance(result, Embedding)], np.float64)


# ------------------------------------------------------------------ embeddings


@PLACES
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_texts_of_all_lengths_in_one_batch_have_the_vectors_that_they_have_alone(
    folder: Path, place: Place, pooling: str
) -> None:
    pipeline = embedding(folder, pooling=pooling)
    runner = place(text_parts.tiny_bert(), pipeline)
    together = vectors(answers(pipeline, runner, TEXTS))
    alone = np.concatenate([vectors(answers(pipeline, runner, (text,))) for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-5
    assert (together * alone).sum(1).min() > 1 - 1e-6
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_a_vector_is_the_mean_of_the_texts_own_states(folder: Path) -> None:
    pipeline, network = embedding(folder, normalize=False), text_parts.tiny_bert()
    (result,) = answers(pipeline, on_cpu(network, pipeline), (TEXTS[0],))
    assert isinstance(result, Embedding)
    (tokens,) = pipeline.preprocess(
        RawInput(kind="text", data=TEXTS[0].encode()), pipeline.parse_options({}), []
    ).tensors
    ids = torch.from_numpy(tokens).long()
    with torch.inference_mode():
        expected = network(ids, torch.ones_like(ids))[0].mean(0).numpy()
    np.testing.assert_allclose(result.values, expected, atol=1e-5)
    assert (result.tokens, result.truncated) == (tokens.shape[1], False)


def test_each_request_says_whether_its_vector_has_length_one(folder: Path) -> None:
    pipeline = embedding(folder)
    runner = on_cpu(text_parts.tiny_bert(), pipeline)
    unit, raw = (vectors(answers(pipeline, runner, TEXTS[:2], normalize=each)) for each in (True, False))
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-6)


def test_what_is_cut_is_told(folder: Path) -> None:
    pipeline = embedding(folder, max_tokens=16)
    short, long = answers(pipeline, on_cpu(text_parts.tiny_bert(), pipeline), (TEXTS[0], TEXTS[5]))
    assert isinstance(short, Embedding)
    assert isinstance(long, Embedding)
    assert (short.tokens, short.truncated) == (10, False)
    assert (long.tokens, long.truncated) == (16, True)
    with pytest.raises(InvalidInput, match=r"text has 27 tokens; the model takes 16"):
        pipeline.preprocess(
            RawInput(kind="text", data=TEXTS[5].encode()), pipeline.parse_options({"truncate": False}), []
        )


def test_a_row_of_nothing_but_padding_is_a_vector_of_finite_numbers(folder: Path) -> None:
    pipeline = embedding(folder)
    runner = on_streams(text_parts.tiny_bert(), pipeline)
    assert runner.run([[np.full((1, 4), -1, np.int32)]], 4, "fp32").finite.all()


def test_a_pooling_that_does_not_fit_the_network_is_told(folder: Path) -> None:
    pipeline = embedding(folder, pooling="none")
    with pytest.raises(ValueError, match=r"preprocessing\.pooling none needs 2 dimensions"):
        answers(pipeline, on_cpu(text_parts.tiny_bert(), pipeline), (TEXTS[0],))


# ------------------------------------------------------------------ what the network gets


def test_the_networks_arguments_come_in_the_configured_order(folder: Path) -> None:
    pipeline = embedding(folder, arguments=("types", "mask", "tokens"), padding_id=9)
    types, mask, tokens = pipeline.normalise({"tokens": torch.tensor([[5, 6, -1]], dtype=torch.int32)})
    assert (types.tolist(), mask.tolist(), tokens.tolist()) == ([[0, 0, 0]], [[1, 1, 0]], [[5, 6, 9]])
    assert {types.dtype, mask.dtype, tokens.dtype} == {torch.int64}


def test_the_lengths_are_powers_of_two_unless_they_are_given(folder: Path) -> None:
    assert embedding(folder, max_tokens=256).lengths == (16, 32, 64, 128, 256)
    assert embedding(folder, max_tokens=100).lengths == (16, 32, 64, 100)
    assert embedding(folder, max_tokens=9).lengths == (9,)
    given = embedding(folder, max_tokens=48, lengths=(12, 48))
    assert [given.bucket([(1, length)]) for length in (1, 12, 13, 48)] == [(12,), (12,), (48,), (48,)]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"lengths": (32, 16, 64)}, r"preprocessing\.lengths \[32, 16, 64\] must be lengths that rise"),
        ({"lengths": (16, 32)}, r"must end with preprocessing\.max_tokens \(64\)"),
        ({"tokenizer": "other.json"}, r"other\.json \(preprocessing\.tokenizer\) is neither in the version's"),
    ],
)
def test_settings_that_can_not_be_are_refused(folder: Path, config: dict[str, Any], told: str) -> None:
    with pytest.raises(StartupError, match=told):
        embedding(folder, **config)


def test_a_cpu_pads_to_the_longest_text_and_a_network_that_was_compiled_to_the_next_length(folder: Path) -> None:
    seen: list[tuple[int, ...]] = []

    class Recorder(text_parts.TinyBert):
        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(tokens.shape))
            return super().forward(tokens, mask)

    pipeline = embedding(folder)
    runner = TorchRunner(Recorder().eval(), pipeline, find("cpu", 0, 1), "fp32")
    answers(pipeline, runner, TEXTS[:3])
    runner.round_up()
    answers(pipeline, runner, TEXTS[:3])
    assert seen == [(3, 10), (3, 16)]


# ------------------------------------------------------------------ classes


@PLACES
@pytest.mark.parametrize("multi_label", [False, True])
def test_classes_of_texts_of_all_lengths_are_those_that_they_have_alone(
    folder: Path, place: Place, multi_label: bool
) -> None:
    pipeline, network = classification(folder, multi_label=multi_label), text_parts.tiny_classifier()
    runner = place(network, pipeline)
    together = answers(pipeline, runner, TEXTS)
    for text, result in zip(TEXTS, together, strict=True):
        (alone,) = answers(pipeline, runner, (text,))
        assert isinstance(result, Classification)
        assert isinstance(alone, Classification)
        assert [label.name for label in result.labels] == [label.name for label in alone.labels]
        np.testing.assert_allclose([one.score for one in result.labels], [one.score for one in alone.labels], atol=1e-5)
        total = sum(label.score for label in result.labels)
        assert (abs(total - 1) < 1e-5) is not multi_label
    with torch.inference_mode():
        ids = torch.from_numpy(pipeline.preprocess(_raw(TEXTS[0]), pipeline.parse_options({}), []).tensors[0]).long()
        logits = network(ids, torch.ones_like(ids))[0]
    expected = logits.sigmoid() if multi_label else logits.softmax(0)
    (first, *_) = together
    assert isinstance(first, Classification)
    np.testing.assert_allclose(
        [label.score for label in first.labels], expected.sort(descending=True).values, atol=1e-5
    )


def test_a_threshold_leaves_classes_out_down_to_none(folder: Path) -> None:
    pipeline = classification(folder, multi_label=True)
    outputs: list[Array] = [np.array([[0.9, 0.5, 0.1]], np.float32), np.array([[1, 2, 0]], np.int32)]
    for threshold, names in ((0.0, ["kind", "neutral", "toxic"]), (0.5, ["kind", "neutral"]), (1.0, [])):
        (result,) = pipeline.postprocess(outputs, {}, pipeline.parse_options({"score_threshold": threshold}))
        assert isinstance(result, Classification)
        assert [label.name for label in result.labels] == names


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"score_threshold": float("nan")}, r"options\.score_threshold is nan"),
        ({"score_threshold": 1.5}, r"options\.score_threshold is 1\.5"),
        ({"top_k": 11}, r"options\.top_k is 11: this model gives at most 10"),
        ({"top_k": 0}, r"options\.top_k is 0"),
        ({"normalize": True}, r"options\.normalize is not an option of this model"),
    ],
)
def test_options_that_can_not_be_are_refused_by_name(folder: Path, given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidOption, match=told):
        classification(folder).parse_options(given)


# ------------------------------------------------------------------ entities


def spans(pipeline: TokenClassification, text: str, tags: dict[str, str], **options: object) -> list[tuple[str, str]]:
    """The entities when each word has the tag that is given for it; the places are checked against the text."""
    asked = pipeline.parse_options(options)
    prepared = pipeline.preprocess(RawInput(kind="text", data=text.encode()), asked, [])
    names = [text[start:end] for start, end in prepared.context["spans"]]
    classes = [pipeline.labels.index(tags.get(name, "O")) for name in names]
    padding = [0] * 5  # what the batch was filled up with
    outputs: list[Array] = [
        np.array([[0.9] * len(classes) + padding], np.float32),
        np.array([classes + padding], np.int32),
    ]
    (result,) = pipeline.postprocess(outputs, prepared.context, asked)
    assert isinstance(result, Entities)
    for entity in result.entities:
        assert text[entity.start : entity.end] == entity.text
        assert pipeline.labels[entity.label.index].endswith(entity.label.name)
    return [(entity.label.name, entity.text) for entity in result.entities]


def test_tokens_become_entities_with_their_places(folder: Path) -> None:
    text = "Anna lives in New York, the dog in Berlin."
    tags = {"Anna": "B-PER", "New": "B-LOC", "York": "I-LOC", "Berlin": "B-LOC"}
    assert spans(tagging(folder), text, tags) == [("PER", "Anna"), ("LOC", "New York"), ("LOC", "Berlin")]


@pytest.mark.parametrize(
    ("labels", "tags"),
    [
        (("O", "B-LOC", "I-LOC", "L-LOC", "U-LOC"), {"New": "B-LOC", "York": "L-LOC", "Berlin": "U-LOC"}),
        (("O", "B-LOC", "I-LOC", "E-LOC", "S-LOC"), {"New": "B-LOC", "York": "E-LOC", "Berlin": "S-LOC"}),
        (("O", "I-LOC", "B-LOC"), {"New": "I-LOC", "York": "I-LOC", "Berlin": "B-LOC"}),
    ],
)
def test_neighbours_are_told_apart_in_each_scheme(folder: Path, labels: tuple[str, ...], tags: dict[str, str]) -> None:
    assert spans(tagging(folder, labels), "New York Berlin", tags) == [("LOC", "New York"), ("LOC", "Berlin")]


def test_without_prefixes_neighbours_of_one_kind_are_one(folder: Path) -> None:
    tags = {"Anna": "PER", "New": "LOC", "York": "LOC", "Berlin": "LOC"}
    assert spans(tagging(folder, ("O", "PER", "LOC")), "Anna New York Berlin", tags) == [
        ("PER", "Anna"),
        ("LOC", "New York Berlin"),
    ]


def test_places_are_right_behind_combining_characters_emoji_and_other_scripts(folder: Path) -> None:
    for before in ("e\u0301te\u0301 ", "🙂 ", "👩\u200d👩\u200d👧 ", "東京 ", "İ ", "\u0000 ", "ﬁ "):
        assert spans(tagging(folder), f"{before}Anna", {"Anna": "B-PER"}) == [("PER", "Anna")], ascii(before)


PARTS = st.lists(st.tuples(st.sampled_from(["", *"BILEUS"]), st.sampled_from(["O", "PER", "LOC"])), max_size=12)


@given(PARTS)
def test_entities_are_what_is_not_outside_in_order_each_of_one_kind(given: list[tuple[str, str]]) -> None:
    parts = [Part(prefix, kind, 1.0, number, number + 1) for number, (prefix, kind) in enumerate(given)]
    found = list(together(parts))
    assert [part for entity in found for part in entity] == [part for part in parts if part.kind != "O"]
    for entity in found:
        assert len({part.kind for part in entity}) == 1
        assert [part.start for part in entity] == list(range(entity[0].start, entity[0].start + len(entity)))
        assert not {part.prefix for part in entity[1:]} & set("BUS")
        assert not {part.prefix for part in entity[:-1]} & set("LEUS")


def test_a_word_of_several_tokens_has_the_class_of_its_first_one(folder: Path) -> None:
    tags = {"Z": "B-PER", "o": "O", "ë": "I-LOC"}
    assert spans(tagging(folder), "Zoë ran", tags) == [("PER", "Zoë")]
    assert spans(tagging(folder, words="each"), "Zoë ran", tags) == [("PER", "Z"), ("LOC", "ë")]


def test_entities_below_the_threshold_are_left_out(folder: Path) -> None:
    assert spans(tagging(folder), "Anna", {"Anna": "B-PER"}, score_threshold=0.95) == []


@PLACES
def test_entities_of_texts_of_all_lengths_are_those_that_they_have_alone(folder: Path, place: Place) -> None:
    pipeline = tagging(folder)
    runner = place(text_parts.tiny_tagger(), pipeline)
    together = answers(pipeline, runner, TEXTS)
    found = 0
    for text, result in zip(TEXTS, together, strict=True):
        (alone,) = answers(pipeline, runner, (text,))
        assert isinstance(result, Entities)
        assert isinstance(alone, Entities)
        key = [(one.start, one.end, one.label.name) for one in result.entities]
        assert key == [(one.start, one.end, one.label.name) for one in alone.entities]
        found += len(key)
    assert found > 10


def _raw(text: str) -> RawInput:
    return RawInput(kind="text", data=text.encode())
