import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ExitCode, InvalidOption, StartupError
from shared.pipeline import RawInput
from shared.pipelines.file_classification import FileClassification, FileClassificationConfig
from shared.results import Classification

ROOT = Path(__file__).parents[4]
LABELS = ("python", "png", "randomtxt", "markdown", "txt", "unknown", "empty")
CLASSES = 4
RULES = {
    "min_bytes": 8,
    "threshold": 0.5,
    "thresholds": {"markdown": 0.75},
    "overwrite": {"randomtxt": "txt"},
    "text": ["python", "randomtxt", "markdown", "txt"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    return tmp_path


def pipeline(folder: Path, labels: tuple[str, ...] = LABELS, **config: Any) -> FileClassification:  # noqa: ANN401 - any setting
    given = {"classes": CLASSES, "rules": "rules.json"} | config
    return FileClassification(msgspec.convert(given, FileClassificationConfig), folder, labels)


def prepared(subject: FileClassification, content: bytes) -> tuple[list[int], dict[str, Any]]:
    out = np.full((1, *subject.spec.inputs[0].shape), 7, np.int32)
    done = subject.preprocess(RawInput(kind="file", data=memoryview(content)), subject.parse_options({}), [out])
    assert done.tensors[0] is out
    return out[0].tolist(), done.context


def test_spec(folder: Path) -> None:
    spec = pipeline(folder, max_top_k=3).spec
    assert (spec.kind, spec.inputs[0].name, spec.inputs[0].datatype, spec.inputs[0].shape) == (
        "file",
        "bytes",
        "INT32",
        (2048,),
    )
    assert [(each.name, each.datatype, each.shape, each.maximum) for each in spec.outputs] == [
        ("scores", "FP32", (3,), None),
        ("classes", "INT32", (3,), CLASSES),
    ]


def magika(content: bytes) -> list[int]:
    """Its `_extract_features_from_seekable`, with the sizes of its model."""
    read = min(4096, len(content))
    first = list(content[:read].lstrip())[:1024]
    last = list(content[len(content) - read :].rstrip())[-1024:]
    return first + [256] * (1024 - len(first)) + [256] * (1024 - len(last)) + last


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b" \t\r\n\x0b\x0c",
        b"  print(1)\n\n",
        bytes(range(256)) * 4,
        bytes(range(256)) * 40,
        b" " * 4090 + b"abcdefgh" + b" " * 4096,
        b" " * 5000 + b"text" * 5000 + b"\n" * 5000,
        b"\x00" * 3000,
    ],
)
def test_head_and_tail_are_those_of_magika(folder: Path, content: bytes) -> None:
    assert prepared(pipeline(folder), content)[0] == magika(content)


@given(content=st.binary(max_size=64) | st.binary(min_size=1000, max_size=9000))
def test_any_bytes_are_a_file(content: bytes) -> None:
    subject = FileClassification(FileClassificationConfig(), Path(), LABELS)
    assert prepared(subject, content) == (magika(content), {"answer": ""})


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (b"", "empty"),
        (b"ab", "txt"),
        (b"\xff\xfe", "unknown"),
        (b" " * 3000 + b"abcdefg", "txt"),
        (b"\n" * 4100, "txt"),
        ("gr\u00fc\u00df".encode(), "txt"),
        ("gr\u00fc\u00df".encode()[:-1], "unknown"),
        (b"abcdefgh", ""),
        (b"  abcdefgh", ""),
    ],
)
def test_what_is_too_short_is_not_judged_by_the_network(folder: Path, content: bytes, answer: str) -> None:
    subject = pipeline(folder)
    context = prepared(subject, content)[1]
    assert context == {"answer": answer}
    if answer:
        ((label,),) = labels_of(subject, [0.9, 0.1, 0.0, 0.0], context=context)
        assert (label.name, label.score, label.index) == (answer, 1.0, LABELS.index(answer))


def labels_of(
    subject: FileClassification, scores: list[float], context: dict[str, Any] | None = None, **options: object
) -> list[list[Any]]:
    outputs = [each.numpy() for each in subject.head((torch.tensor([scores]),))]
    found = subject.postprocess(outputs, context or {"answer": ""}, subject.parse_options(options))
    assert all(isinstance(each, Classification) for each in found)
    return [each.labels for each in found]  # type: ignore[union-attr]  # see the line above


@pytest.mark.parametrize(
    ("scores", "given", "names"),
    [
        ([0.6, 0.3, 0.06, 0.04], {}, ["python", "png", "randomtxt", "markdown"]),
        ([0.5, 0.3, 0.16, 0.04], {}, ["python", "png", "randomtxt", "markdown"]),
        ([0.49, 0.3, 0.17, 0.04], {}, ["txt", "python", "png", "randomtxt", "markdown"]),
        ([0.3, 0.49, 0.17, 0.04], {}, ["unknown", "png", "python", "randomtxt", "markdown"]),
        ([0.3, 0.49, 0.17, 0.04], {"confidence": "best_guess"}, ["png", "python", "randomtxt", "markdown"]),
        ([0.1, 0.1, 0.1, 0.7], {}, ["txt", "markdown", "python", "png", "randomtxt"]),
        ([0.1, 0.1, 0.1, 0.7], {"confidence": "medium"}, ["markdown", "python", "png", "randomtxt"]),
        ([0.1, 0.05, 0.05, 0.8], {"top_k": 1}, ["markdown"]),
        ([0.6, 0.3, 0.06, 0.04], {"score_threshold": 0.2}, ["python", "png"]),
        ([0.1, 0.0, 0.9, 0.0], {"top_k": 2}, ["txt", "randomtxt"]),
        ([0.1, 0.0, 0.4, 0.0], {"confidence": "best_guess", "top_k": 1}, ["txt"]),
    ],
)
def test_the_rules_have_the_first_word(
    folder: Path, scores: list[float], given: dict[str, object], names: list[str]
) -> None:
    config = {key: value for key, value in given.items() if key == "confidence"}
    options = {key: value for key, value in given.items() if key != "confidence"}
    (labels,) = labels_of(pipeline(folder, **config), scores, **options)
    assert sorted(label.name for label in labels) == sorted(names)
    assert labels[0].name == names[0]
    assert labels[0].score == pytest.approx(max(scores))
    assert [label.score for label in labels] == sorted((label.score for label in labels), reverse=True)
    assert all(LABELS[label.index] == label.name for label in labels)


def test_without_rules_the_best_class_is_told(tmp_path: Path) -> None:
    subject = FileClassification(FileClassificationConfig(logits=True), tmp_path, LABELS[:4])
    (labels,) = labels_of(subject, [1.0, 0.0, 0.0, 0.0])
    assert labels[0].name == "python"
    assert sum(label.score for label in labels) == pytest.approx(1.0)
    assert prepared(subject, b"")[1] == {"answer": ""}


def test_a_network_with_other_classes_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"gives \[5\] numbers a row, labels say 4"):
        pipeline(folder).head((torch.zeros(2, 5),))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"top_k": 0}, r"options\.top_k is 0"),
        ({"top_k": 11}, r"at most 10 \(preprocessing\.max_top_k\)"),
        ({"score_threshold": 1.5}, r"options\.score_threshold is 1\.5"),
        ({"score_threshold": float("nan")}, r"options\.score_threshold is nan"),
        ({"mode": "high"}, r"options\.mode is not an option"),
    ],
)
def test_wrong_options_are_named(folder: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        pipeline(folder).parse_options(options)


@pytest.mark.parametrize(
    ("labels", "config", "rules", "sentence"),
    [
        ((), {}, RULES, "the labels file has 0 lines; the network has 4 classes"),
        (LABELS, {"classes": 8}, RULES, "the labels file has 7 lines; the network has 8 classes"),
        (LABELS[:6], {}, RULES, "rules.json answers with 'empty', which is not in the labels file"),
        (LABELS, {"rules": "gone.json"}, RULES, r"gone.json \(preprocessing.rules\) is neither in the version's"),
        (LABELS, {}, {"threshold": 2}, r"rules.json \(preprocessing.rules\) can't be read: .*<= 1"),
        (LABELS, {}, {"treshold": 0.5}, r"rules.json \(preprocessing.rules\) can't be read: .*unknown field"),
    ],
)
def test_what_does_not_belong_together_is_told(
    folder: Path, labels: tuple[str, ...], config: dict[str, Any], rules: dict[str, Any], sentence: str
) -> None:
    (folder / "rules.json").write_text(json.dumps(rules))
    with pytest.raises(StartupError, match=sentence) as caught:
        pipeline(folder, labels, **config)
    assert caught.value.exit_code == ExitCode.MODEL_LOAD


def test_nothing_may_reach_the_threshold(folder: Path) -> None:
    assert labels_of(pipeline(folder), [0.6, 0.3, 0.06, 0.04], score_threshold=0.7) == [[]]


def test_the_example_is_judged_by_the_network(folder: Path) -> None:
    subject = pipeline(folder)
    content = bytes(subject.example().data)
    assert prepared(subject, content)[1] == {"answer": ""}


def test_gateway_and_pool_load_it_without_torch() -> None:
    code = "import sys, shared.pipelines.file_classification; sys.exit('torch' in sys.modules or 'cv2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
