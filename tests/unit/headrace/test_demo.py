import io
import re
import socket
from pathlib import Path

import pytest
from rich.console import Console

from headrace import demo, demo_photos
from headrace.client_results import Classified, Label, Outcome, ServerTiming
from headrace.zoo_samples import Photo
from shared.errors import ExitCode, StartupError

LABELS = tuple(f"class {index}" for index in range(40))
PHOTOS = [Photo(Path(f"imagenet_{index:02}_{index}.jpg"), index) for index in range(20)]


def _outcome(index: int, classes: list[int]) -> Outcome:
    labels = tuple(Label(one, LABELS[one], 0.5) for one in classes)
    timing = ServerTiming(prepare_ms=3.0, wait_ms=1.0, batch_ms=2.0, run_ms=25.0, batch_rows=8)
    return Outcome(
        index,
        PHOTOS[index].path,
        result=Classified(labels, model="m", version="v", request_id="r", server_timing=timing),
    )


def _report(outcomes: list[Outcome], width: int = 80) -> tuple[bool, str]:
    stream = io.StringIO()
    code = demo_photos.report(Console(file=stream, width=width), PHOTOS, outcomes, LABELS, 0.5)
    return code, stream.getvalue()


@pytest.mark.parametrize(("wrong", "good"), [(0, True), (3, True), (4, False), (20, False)])
def test_seventeen_right_answers_are_enough(wrong: int, good: bool) -> None:
    outcomes = [_outcome(index, [30, index] if index < wrong else [index, 30]) for index in range(20)]
    left, text = _report(outcomes)
    assert left == good
    assert f"top-1 {20 - wrong} of 20 right (17 are enough), top-5 20; 20 photos in 0.50 s" in text


def test_a_row_shows_truth_answer_place_and_times() -> None:
    outcomes = [_outcome(index, [index]) for index in range(20)]
    outcomes[3] = _outcome(3, [30, 31, 3])
    outcomes[4] = _outcome(4, [30, 31])
    outcomes[5] = Outcome(5, PHOTOS[5].path, error=FileNotFoundError(2, "No such file"))
    _, text = _report(outcomes)
    assert re.search(r"00 +class 0 +✓ 50 % +✓ 1\. +3\.0 +3\.0 +25\.0 +8", text)
    assert re.search(r"03 +class 3 +✗ class 30 50 % +✓ 3\.", text)
    assert re.search(r"04 +class 4 +✗ class 30 50 % +✗ +3\.0", text)
    assert re.search(r"05 +class 5 +✗ can't be read:", text)


def test_a_wide_terminal_shows_the_other_classes_too() -> None:
    outcomes = [_outcome(index, [index, 30, 31]) for index in range(20)]
    _, text = _report(outcomes, width=160)
    assert re.search(r"00 +class 0 +✓ class 0 50 % +✓ 1\. class 30, class 31 +3\.0", text)


def test_without_a_server_at_the_address_the_demo_says_so() -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StartupError, match="headrace serve") as caught:
            demo.run(f"127.0.0.1:{taken.getsockname()[1]}", None, ["classify"])
    assert caught.value.exit_code == ExitCode.PEER_LOST


@pytest.mark.parametrize(
    ("task", "needs"),
    [("detect", ["pictures"]), ("embed", []), ("classify", ["efficientnet-lite0", "photos"])],
)
def test_at_an_address_no_model_is_fetched_but_for_the_names_of_classes(
    task: str, needs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(demo.zoo, "fetch", lambda name, *_: fetched.append(name))
    monkeypatch.setattr(demo, "fetch_photos", lambda *_: fetched.append("photos"))
    monkeypatch.setattr(demo, "fetch_pictures", lambda *_: fetched.append("pictures"))
    shown = demo._Task("model", lambda _demo: bool(fetched.append("shown")) or True)
    monkeypatch.setitem(demo.TASKS, task, shown)
    assert demo.run("127.0.0.1:1", None, [task]) == 0
    assert fetched == [*needs, "shown"]


def test_a_task_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(StartupError, match="--task is 'dance'; known: classify, detect, embed, texts, generate"):
        demo.run(None, None, ["dance"])
