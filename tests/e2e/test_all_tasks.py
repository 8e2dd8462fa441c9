"""All five tasks of the demo on one worker within a memory budget, at the same time, and as people type them."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace import Client
from headrace.admin_client import AdminClient
from headrace.client_results import Classification, Text
from headrace.demo import TASKS
from headrace.demo_server import READY_LIMIT_S
from headrace.zoo import DEFAULT_MODEL
from headrace.zoo_samples import fetch_photos, fetch_pictures
from shared.settings_loader import load as load_settings
from tests.support.stack import ROOT, Site, serving
from tests.support.zoo_parts import CACHE, fetched

BUDGET_BYTES = 1_500_000_000
"""Of all models together; the largest takes 540 MB and its cache."""
LIMIT_S = 120.0
EACH = 6
"""Answers that every task must have before the load ends."""
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    repository = CACHE / "demo" / "models"
    for task in TASKS.values():
        fetched(task.model, repository)
    site = Site(
        tmp_path_factory.mktemp("tasks"),
        repository,
        models=[task.model for task in TASKS.values()],  # type: ignore[arg-type]  # a list is a setting, too
        worker={"memory_budget_bytes": BUDGET_BYTES},
    )
    with serving(site, READY_LIMIT_S):
        yield site


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[Client]:
    with Client(site.grpc, timeout_s=LIMIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def photo() -> Path:
    return fetch_photos(ROOT / "models")[16].path


@pytest.fixture(scope="module")
def street() -> Path:
    return fetch_pictures(ROOT / "models")[0]


class Answer(NamedTuple):
    """What can be compared, whatever the batch was that it ran in."""

    words: list[str]
    numbers: list[float]

    def agrees(self, other: "Answer") -> bool:
        return self.words == other.words and self.numbers == pytest.approx(other.numbers, abs=2e-3)


Ask = Callable[[Client], Answer]


@pytest.fixture(scope="module")
def asks(photo: Path, street: Path) -> dict[str, Ask]:
    """One call of each task."""

    def labels(client: Client) -> Answer:
        found = client.classify(photo, model=DEFAULT_MODEL).labels
        return Answer([label.name for label in found], [label.score for label in found])

    def boxes(client: Client) -> Answer:
        found = client.detect(street, model="yolov3-tiny").detections
        return Answer([one.label.name for one in found], [one.label.score for one in found])

    def vector(client: Client) -> Answer:
        return Answer([], [*client.embed("The river turns the wheel.", model="all-minilm-l6-v2").values])

    def rude(client: Client) -> Answer:
        (answer,) = client.predict([Text("You are a stupid idiot.")], model="toxic-comment").results
        assert isinstance(answer, Classification)
        return Answer([label.name for label in answer.labels], [label.score for label in answer.labels])

    def text(client: Client) -> Answer:
        return Answer([client.generate(QUESTION, model="smollm2-135m", max_tokens=16).whole().text], [])

    return {"classify": labels, "detect": boxes, "embed": vector, "texts": rude, "generate": text}


def test_under_a_mixed_load_every_answer_is_right_and_no_task_waits_for_the_others_to_end(
    client: Client, site: Site, asks: dict[str, Ask]
) -> None:
    alone = {name: ask(client) for name, ask in asks.items()}
    assert alone["generate"].words == ["The capital of France is Paris."]
    answered = dict.fromkeys(asks, 0)
    enough, lock = threading.Event(), threading.Lock()

    def load(name: str) -> None:
        while not enough.is_set():
            assert asks[name](client).agrees(alone[name]), name
            with lock:
                answered[name] += 1
                if min(answered.values()) >= EACH:
                    enough.set()

    with ThreadPoolExecutor(2 * len(asks)) as pool:
        for done in [pool.submit(load, name) for name in asks for _ in range(2)]:
            done.result(LIMIT_S)
    with AdminClient.connect(load_settings(site.config).settings) as admin:
        (said,) = admin.models().memory
    assert 0 < said.models_bytes <= BUDGET_BYTES


def test_the_demo_shows_all_tasks_at_a_running_server(site: Site) -> None:
    done = headrace("demo", "--address", site.grpc)
    assert done.returncode == 0, done.stdout + done.stderr
    for told in (
        "of 20 right",
        "✓ bus.jpg: 4 persons and 1 bus",
        "✓ like ones are above",
        "✓ the rude one is told from the others",
        "The capital of France is Paris.",
    ):
        assert told in done.stdout


def test_every_task_has_a_command_that_answers_programs(site: Site, photo: Path, street: Path, tmp_path: Path) -> None:
    at = ("--address", site.grpc, "--json")
    (row,) = rows("classify", str(photo), "--model", DEFAULT_MODEL, *at)
    assert row["labels"][0]["index"] == 251
    drawn = tmp_path / "found.png"
    (row,) = rows("detect", str(street), "--draw", str(drawn), *at, "--model", "yolov3-tiny")
    assert [one["label"]["name"] for one in row["detections"]].count("person") == 4
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    found = rows("embed", "one text", "another one", *at, "--model", "all-minilm-l6-v2")
    assert [len(each["embedding"]) for each in found] == [384, 384]
    (row,) = rows(
        "generate", "What is the capital of France?", "--chat", "--max-tokens", "16", *at, "--model", "smollm2-135m"
    )
    assert row["text"] == "The capital of France is Paris."


def headrace(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def rows(*arguments: str) -> list[dict[str, Any]]:
    done = headrace(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
