"""Generated text through the whole stack, with a small model of the zoo: `headrace serve` as users start it."""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import Client
from headrace.client_errors import DeadlineExceeded, InvalidRequest, Unavailable
from headrace.client_results import Text
from tests.support import own_process
from tests.support.generators import greedy_alone, network_of, pipeline_of, version_of
from tests.support.stack import ROOT, Site, eventually, serving

NAME = "textgenrnn"
ENDLESS = "The best"
"""Goes on about the state of the state until it is stopped."""
PROMPTS = ("Why is", "The number of", "I have a", "What is the", "My cat", "TIL that", "A", "Breaking news: the man in")


def repository(root: Path) -> Path:
    version = version_of(NAME)
    shutil.copytree(version.folder, root / NAME)
    return root


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("texts")
    site = Site(folder / "site", repository(folder / "models"))
    with serving(site):
        yield site


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "site", repository(tmp_path / "models"))
    yield site
    site.kill_all()


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with Client(site.grpc) as client:
        yield client


def told(site: Site) -> dict[str, Any]:
    """What `/debug` says of the only model's texts."""
    return next(iter(site.debug().get("generation", [])), {})


def at_rest(site: Site) -> bool:
    return told(site).get("tokens_reserved") == 0 and told(site).get("waiting_texts") == 0


@functools.cache
def reference(prompt: str, count: int) -> str:
    """From the network alone, in this process, on one thread: the server has the other one."""
    torch.set_num_threads(1)
    pipeline = pipeline_of(NAME)
    vocabulary = pipeline.vocabulary()
    raw = pipeline.example()
    tokens = pipeline.preprocess(type(raw)(kind="text", data=prompt.encode()), pipeline.parse_options({}), []).tensors[
        0
    ]
    said = greedy_alone(network_of(NAME), tokens[0].tolist(), count, vocabulary.end_ids)
    return b"".join(vocabulary.piece(token) for token in said).decode()


def test_a_text_grows_and_is_what_the_network_says_alone(client: Client) -> None:
    text = client.generate(ENDLESS, max_tokens=40)
    pieces = list(text)
    assert len(pieces) > 10
    assert text.text == "".join(pieces) == reference(ENDLESS, 40)
    assert text.finished is not None
    assert (text.finished.reason, text.finished.completion_tokens) == ("length", 40)
    assert 0 < text.server_timing.first_ms < text.server_timing.run_ms + text.server_timing.first_ms


def test_predict_gives_whole_texts(client: Client) -> None:
    answer = client.predict([Text("Why is"), Text("My cat")], options={"max_tokens": 12})
    assert [result.text for result in answer.results if isinstance(result, Text)] == [
        reference("Why is", 12),
        reference("My cat", 12),
    ]


def test_texts_that_join_and_leave_at_random_say_what_they_say_alone(client: Client, site: Site) -> None:
    """Some callers read to the end, some leave in the middle."""
    chosen = random.Random(7)  # noqa: S311 - a fixed order, no secret
    asked = [(chosen.choice(PROMPTS), chosen.randint(1, 60), chosen.random() < 0.3) for _ in range(60)]
    expected = {prompt: reference(prompt, 60) for prompt in PROMPTS}
    ends = {prompt: client.generate(prompt, max_tokens=60).whole() for prompt in PROMPTS}

    def one(prompt: str, count: int, leaves: bool) -> tuple[str, str]:
        with client.generate(prompt, max_tokens=count, timeout_s=60) as text:
            if leaves:
                next(text, "")
                return prompt, text.text
            return prompt, text.whole().text

    with ThreadPoolExecutor(20) as threads:
        for (prompt, got), (_, count, leaves) in zip(threads.map(lambda each: one(*each), asked), asked, strict=True):
            assert expected[prompt].startswith(got)
            if not leaves:
                finished = ends[prompt].finished
                assert finished is not None
                assert got == expected[prompt][: min(count, finished.completion_tokens)]
    eventually("all room to be back", lambda: at_rest(site), 10)


def test_the_same_seed_gives_the_same_text_whoever_is_beside_it(client: Client) -> None:
    def one(seed: int) -> str:
        return client.generate("I have", max_tokens=30, temperature=0.8, seed=seed).whole().text

    with ThreadPoolExecutor(8) as threads:
        first = list(threads.map(one, range(8)))
    assert [one(seed) for seed in range(8)] == first
    assert len(set(first)) > 1


def test_stop_strings_beams_and_log_probabilities(client: Client) -> None:
    stopped = client.generate(ENDLESS, max_tokens=200, stop=[" of the"]).whole()
    assert stopped.finished is not None
    assert stopped.finished.reason == "stop_string"
    assert " of the" not in stopped.text
    assert client.generate("My cat", max_tokens=12, beams=3).whole().text
    told_of = client.generate("My cat", max_tokens=5, logprobs=2).whole()
    assert len(told_of.tokens) == 5
    assert all(token.logprob <= 0 and len(token.alternatives) == 2 for token in told_of.tokens)
    assert b"".join(token.data for token in told_of.tokens).decode() == told_of.text


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("", {}, "text has 0 bytes"),
        ("x" * 2000, {}, "text has 2001 tokens; this model's context leaves room for 1023"),
        ("x" * 10_000_000, {}, "characters, too many"),
        ("a", {"temperature": float("nan")}, "options.temperature is nan"),
        ("a", {"top_p": 0.5}, "options.top_p needs options.temperature"),
        ("a", {"stop_token_ids": [10**6]}, "options.stop_token_ids"),
        ("a", {"beams": 2, "temperature": 0.5}, "contradicts options.beams"),
        ("a", {"max_tokens": 5000}, "options.max_tokens is 5000"),
        ("a", {"iou_threshold": 0.5}, "options.iou_threshold is not an option"),
    ],
    ids=["empty", "long", "10 MB", "NaN", "top_p", "stop token", "beams", "max_tokens", "another task's"],
)
def test_bad_requests_name_the_field_and_hurt_nobody(
    client: Client, prompt: str, options: dict[str, Any], said: str
) -> None:
    beside = client.generate(ENDLESS, max_tokens=30)
    with pytest.raises(InvalidRequest) as refused:
        client.generate(prompt, **options).whole()
    assert said in refused.value.text
    assert beside.whole().text == reference(ENDLESS, 30)


def test_a_deadline_ends_a_text_in_the_middle_and_keeps_what_came(client: Client, site: Site) -> None:
    text = client.generate(ENDLESS, max_tokens=1000, timeout_s=0.5)
    with pytest.raises(DeadlineExceeded):
        text.whole()
    assert text.text[:40] == reference(ENDLESS, 40)[: len(text.text)]
    assert text.text
    eventually("its room to be back", lambda: at_rest(site), 5)


def test_a_closed_call_frees_its_room_with_the_next_token(client: Client, site: Site) -> None:
    with client.generate(ENDLESS, max_tokens=1000) as text:
        next(text)
        assert told(site)["running_sequences"] == 1
    eventually("its room to be back", lambda: at_rest(site), 2)


def test_http_and_tritons_client_and_the_command_line(site: Site) -> None:
    wanted = reference("My cat", 12)
    body = json.dumps({"text_input": "My cat", "parameters": {"max_tokens": 12}}).encode()
    with urllib.request.urlopen(f"http://{site.http}/v2/models/{NAME}/generate_stream", body, timeout=30) as answer:
        events = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.strip()]
    assert "".join(event["text_output"] for event in events) == wanted
    assert events[-1]["finish_reason"] == "length"
    pieces = own_process.run("tests.support.triton_texts", "read_along", site.grpc, NAME, "My cat", 12)
    assert "".join(pieces) == wanted
    assert len(pieces) > 3
    command = [sys.executable, "-m", "headrace", "generate", "My cat", "--max-tokens", "12", "--address", site.grpc]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=site.folder, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == wanted + "\n"


def test_every_call_is_counted_once(client: Client, site: Site) -> None:
    def counted() -> dict[str, float]:
        lines = site.get("/metrics")[1].splitlines()
        found = [line for line in lines if line.startswith("headrace_requests_total{")]
        return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in found if NAME in line}

    before = counted()
    for _ in range(3):
        client.generate("A", max_tokens=3).whole()
    with pytest.raises(InvalidRequest):
        client.generate("x" * 2000).whole()
    with pytest.raises(DeadlineExceeded):
        client.generate(ENDLESS, max_tokens=1000, timeout_s=0.2).whole()
    eventually("all ends", lambda: sum(counted().values()) == sum(before.values()) + 5)
    after = counted()
    assert {
        reason: after[reason] - before.get(reason, 0) for reason in ("ok", "invalid_input", "deadline_exceeded")
    } == {
        "ok": 3,
        "invalid_input": 1,
        "deadline_exceeded": 1,
    }


@pytest.mark.alone
def test_a_killed_worker_ends_what_has_grown_and_nothing_else(own: Site) -> None:
    with serving(own), Client(own.grpc, timeout_s=60, max_attempts=1) as client:
        grown = client.generate(ENDLESS, max_tokens=1000)
        begun = next(grown)
        waiting: list[str] = []
        # More than run at a time: some have said nothing when the worker dies, and begin again with the next one.
        callers = [
            threading.Thread(target=lambda: waiting.append(client.generate("My cat", max_tokens=8).whole().text))
            for _ in range(4)
        ]
        os.kill(own.worker_pids()[0], signal.SIGSTOP)
        for caller in callers:
            caller.start()
        eventually("the others to be sent", lambda: told(own).get("running_sequences") == 5, 10)
        os.kill(own.worker_pids()[0], signal.SIGKILL)
        with pytest.raises(Unavailable, match="can't go on elsewhere"):
            grown.whole()
        assert grown.text.startswith(begun)
        for caller in callers:
            caller.join(60)
        assert waiting == [reference("My cat", 8)] * 4
        eventually("all room to be back", lambda: at_rest(own), 10)
        assert client.generate("My cat", max_tokens=8).whole().text == reference("My cat", 8)


@pytest.mark.alone
def test_a_stop_that_cannot_wait_for_a_text_says_so_after_what_has_grown(tmp_path: Path) -> None:
    site = Site(tmp_path / "site", repository(tmp_path / "models"), gateway={"drain_ms": 100})
    with serving(site) as server, Client(site.grpc, timeout_s=60, max_attempts=1) as client:
        text = client.generate(ENDLESS, max_tokens=1000)
        begun = next(text)
        server.signal(signal.SIGTERM)
        with pytest.raises(Unavailable, match="the server is stopping"):
            text.whole()
        assert text.text.startswith(begun)
        assert server.wait() == 0


@pytest.mark.alone
def test_a_version_stays_until_its_last_text_has_ended(own: Site) -> None:
    with serving(own), Client(own.grpc, timeout_s=60) as client:
        with client.generate(ENDLESS, max_tokens=1000) as text:
            next(text)
            config = own.folder.parent / "models" / NAME / "model.yaml"
            config.write_text(config.read_text() + "\n# changed\n")
            eventually("the new one beside the old", lambda: _roles(own) == ["current", "retiring"], 30)
            assert client.generate("My cat", max_tokens=8).whole().text == reference("My cat", 8)
            for piece in text:
                assert piece
                if len(text.text) > 400:
                    break
            assert _roles(own) == ["current", "retiring"]
        eventually("the old one to go", lambda: _roles(own) == ["current"], 10)


def _roles(site: Site) -> list[str]:
    return sorted(model["role"] for model in site.debug().get("models", []))


@pytest.mark.alone
def test_several_gateways_and_workers_share_a_model_that_is_loaded_on_demand(tmp_path: Path) -> None:
    models = repository(tmp_path / "models")
    config = models / NAME / "model.yaml"
    config.write_text(config.read_text() + "\nload: on_demand\n")
    gateway = {"processes": 2, "max_message_bytes": 1 << 20}
    site = Site(tmp_path / "site", models, gateway=gateway, worker={"count": 2})

    def one(number: int) -> str:
        with Client(site.grpc, timeout_s=60) as client:  # a connection of its own, which reaches either gateway
            return client.generate(PROMPTS[number % len(PROMPTS)], max_tokens=20).whole().text

    with serving(site):
        with ThreadPoolExecutor(40) as threads:
            texts = list(threads.map(one, range(40)))
        assert texts == [reference(PROMPTS[number % len(PROMPTS)], 20) for number in range(40)]
        by_gateway = [each["generation"][0] for each in site.debug()["gateways"].values() if each["generation"]]
        assert [each["tokens_reserved"] for each in by_gateway] == [0] * len(by_gateway)
