"""Texts through the whole stack: right answers in company of any length, a budget of tokens, and what people get wrong.

The networks are small ones of random weights, so that a reference beside the server takes no time; the zoo's models
have tests of their own.
"""

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton  # its gRPC half brings messages of the same names as ours

from headrace import Client
from headrace.client_errors import InvalidRequest
from headrace.client_results import Classification, Embedding, Entities, Text
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from shared.tensors import Array
from shared.text_tokens import Tokeniser
from tests.support import text_parts
from tests.support.stack import ROOT, Site, serving
from tests.support.text_parts import TEXTS, WORDS, write_models, write_tokeniser

pytestmark = pytest.mark.alone  # company in a batch is a matter of time

BUDGET = 256
"""Tokens of a batch: 16 rows of 16, 4 of 64."""
BATCHING = f"batching: {{max_rows: 16, max_wait_ms: 20, max_tokens: {BUDGET}}}\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = write_models(tmp_path_factory.mktemp("texts") / "models", BATCHING)
    site = Site(tmp_path_factory.mktemp("site"), root)
    with serving(site):
        yield site


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[Client]:
    with Client(site.grpc, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokeniser(tmp_path_factory: pytest.TempPathFactory) -> Tokeniser:
    return Tokeniser(write_tokeniser(tmp_path_factory.mktemp("tokens")), text_parts.MAX_TOKENS)


def sentences(count: int) -> list[str]:
    """Of all lengths, most of them short."""
    chance = random.Random(3)  # noqa: S311 - the same ones each time
    return [" ".join(chance.choices(WORDS, k=min(70, int(chance.paretovariate(0.8)) + 2))) for _ in range(count)]


def reference(texts: list[str], tokeniser: Tokeniser) -> Array:
    """One text at a time, in float32, without any part of the server but the tokeniser."""
    network, found = text_parts.tiny_bert(), []
    with torch.inference_mode():
        for text in texts:
            ids = torch.from_numpy(tokeniser.encode(text.encode(), truncate=True).ids[None]).long()
            found.append(torch.nn.functional.normalize(network(ids, torch.ones_like(ids))[0].mean(0), dim=0).numpy())
    return np.array(found)


def test_hundreds_of_texts_of_all_lengths_have_the_vectors_that_they_have_alone(
    client: Client, tokeniser: Tokeniser
) -> None:
    texts = sentences(400)
    found = {outcome.index: outcome for outcome in client.embed_many(texts, model="embed", in_flight=96)}
    results = [found[index].result for index in range(len(texts))]
    assert all(result is not None for result in results)
    got = np.array([result.values for result in results if result is not None])
    expected = reference(texts, tokeniser)
    assert np.abs(got - expected).max() < 1e-5
    assert (got * expected).sum(1).min() > 1 - 1e-4
    tokens = [len(tokeniser.encode(text.encode(), truncate=True).ids) for text in texts]
    assert [result.tokens for result in results if result is not None] == tokens
    assert any(result.truncated for result in results if result is not None)
    assert len(set(tokens)) > 20
    rows = [result.server_timing.batch_rows for result in results if result is not None]
    assert max(rows) >= 4, "they never had company"
    for length, count in zip(tokens, rows, strict=True):
        bucket = next(bucket for bucket in (16, 32, 64) if bucket >= length)
        assert bucket * count <= BUDGET, (length, count)


def test_classes_and_entities_in_company_are_those_alone(client: Client) -> None:
    for model in ("classify", "tag"):
        together = client.predict(map(Text, TEXTS), model=model).results
        alone = [client.predict([Text(text)], model=model).results[0] for text in TEXTS]
        for one, other, text in zip(together, alone, TEXTS, strict=True):
            if isinstance(one, Classification):
                assert isinstance(other, Classification)
                assert [label.name for label in one.labels] == [label.name for label in other.labels]
                assert [label.score for label in one.labels] == pytest.approx([label.score for label in other.labels])
            else:
                assert isinstance(one, Entities)
                assert isinstance(other, Entities)
                assert [(each.start, each.end, each.label.name) for each in one.entities] == [
                    (each.start, each.end, each.label.name) for each in other.entities
                ]
                assert all(text[each.start : each.end] == each.text for each in one.entities)


# ------------------------------------------------------------------ what people get wrong

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MEGABYTES = "the river turns the wheel " * 400_000


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (pb.PredictRequest(model="embed", inputs=[pb.Input(text="")]), r"inputs\[0\]\.text has 0 bytes"),
        (pb.PredictRequest(model="embed", inputs=[pb.Input(text=" \n ")]), "text is empty"),
        (
            pb.PredictRequest(model="embed", inputs=[pb.Input(text=MEGABYTES)], options=pb.Options(truncate=False)),
            r"text has over 4096 characters, too many for the 64 tokens",
        ),
        (
            pb.PredictRequest(model="embed", inputs=[pb.Input(text="mill " * 63)], options=pb.Options(truncate=False)),
            r"text has 65 tokens; the model takes 64 \(preprocessing\.max_tokens\)",
        ),
        (
            pb.PredictRequest(
                model="classify", inputs=[pb.Input(text="a")], options=pb.Options(score_threshold=math.nan)
            ),
            r"options\.score_threshold is nan",
        ),
        (
            pb.PredictRequest(model="tag", inputs=[pb.Input(text="a")], options=pb.Options(score_threshold=math.inf)),
            r"options\.score_threshold is inf",
        ),
        (
            pb.PredictRequest(model="embed", inputs=[pb.Input(text="a")], options=pb.Options(top_k=1)),
            r"options\.top_k is not an option of this model",
        ),
        (pb.PredictRequest(model="embed", inputs=[pb.Input(image=b"x")]), "takes a text"),
    ],
    ids=["empty", "blank", "10 MB", "one token too many", "NaN", "infinite", "another task's option", "image"],
)
def test_mistakes_are_told_by_field(site: Site, request_: pb.PredictRequest, told: str) -> None:
    with grpc.insecure_channel(site.grpc) as channel, pytest.raises(grpc.RpcError, match=told) as refused:
        pb_grpc.InferenceStub(channel).Predict(request_, timeout=30)
    assert refused.value.code() is INVALID  # type: ignore[attr-defined]  # a call's error has a code


def test_ten_megabytes_are_cut_and_told(client: Client) -> None:
    answer = client.embed(MEGABYTES, model="embed")
    assert (answer.tokens, answer.truncated) == (64, True)


def test_bad_texts_cost_their_batch_mates_nothing(client: Client, tokeniser: Tokeniser) -> None:
    texts = ["the river", " ", "turns the wheel", "\u0000", "of the mill " * 40]
    answer = client.predict(map(Text, texts), model="embed", partial_results=True, options={"truncate": False})
    kinds = [type(result) for result in answer.results]
    assert kinds == [Embedding, InvalidRequest, Embedding, InvalidRequest, InvalidRequest]
    got = np.array([result.values for result in answer.results if isinstance(result, Embedding)])
    assert np.abs(got - reference([texts[0], texts[2]], tokeniser)).max() < 1e-5


def test_bytes_that_are_no_utf8_are_told_by_element(site: Site) -> None:
    with triton.InferenceServerClient(site.http) as server:
        text = triton.InferInput("text", [2, 1], "BYTES")
        text.set_data_from_numpy(np.array([[b"fine"], [b"ab\xff"]], object))
        with pytest.raises(Exception, match="input 'text': element 1 is not UTF-8 at byte 2"):
            server.infer("embed", [text])
        text.set_data_from_numpy(np.array([[b"the river"], ["é 🙂 東京".encode()]], object))
        found = server.infer("embed", [text])
        assert found.as_numpy("embedding").shape == (2, text_parts.WIDTH)
        assert found.as_numpy("tokens").ravel().tolist() == [4, 6]


# ------------------------------------------------------------------ as a plain upload


def uploaded(site: Site, path: str, text: str) -> httpx.Response:
    return httpx.post(f"http://{site.http}{path}", content=text.encode(), timeout=30)


def test_one_text_as_a_plain_upload(site: Site, client: Client, tokeniser: Tokeniser) -> None:
    told = uploaded(site, "/v1/embed?model=embed", TEXTS[0]).json()
    np.testing.assert_allclose(told["embedding"], reference([TEXTS[0]], tokeniser)[0], atol=1e-5)
    assert (told["tokens"], told["truncated"]) == (10, False)
    assert uploaded(site, "/v1/embed", TEXTS[0]).json()["model"] == "embed", "the only one of this task"
    raw = uploaded(site, "/v1/embed?model=embed&normalize=false", TEXTS[0]).json()["embedding"]
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    found = uploaded(site, "/v1/entities?model=tag", TEXTS[4]).json()
    assert [(each["start"], each["end"], each["text"]) for each in found["entities"]] == [
        (each.start, each.end, each.text) for each in client.entities(TEXTS[4], model="tag").entities
    ]
    assert uploaded(site, "/v1/classify?model=classify&top_k=1", "dog").json()["labels"][0]["name"]


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("/v1/embed?model=embed", "", "the upload has 0 bytes"),
        ("/v1/embed?model=embed", " ", "text is empty"),
        ("/v1/embed?model=embed&truncate=false", "mill " * 99, "text has 101 tokens; the model takes 64"),
        ("/v1/entities?model=tag&score_threshold=nan", "a", "options.score_threshold is nan"),
        ("/v1/embed?model=tag", "a", "model 'tag' does not answer with a vector"),
    ],
)
def test_mistakes_of_a_plain_upload_are_told(site: Site, path: str, text: str, told: str) -> None:
    answer = uploaded(site, path, text)
    assert answer.status_code == 400
    assert told in answer.text


# ------------------------------------------------------------------ the command line


def headrace(site: Site, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments, "--address", site.grpc],
        cwd=ROOT, input=stdin, capture_output=True, timeout=60, check=False,
    )  # fmt: skip


def test_embed_writes_vectors_of_a_file_and_standard_input(site: Site, tmp_path: Path, tokeniser: Tokeniser) -> None:
    texts = sentences(40)
    file, out = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    file.write_text("\n".join(texts[1:30]), encoding="utf-8")
    done = headrace(
        site, "embed", texts[0], "-", "--file", str(file), "--out", str(out), "--model", "embed", "--json",
        stdin="\n".join(texts[30:]).encode(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 40
    got = np.load(out, allow_pickle=False)
    np.testing.assert_allclose(got, reference(texts, tokeniser), atol=1e-5)


def test_classify_takes_texts(site: Site) -> None:
    done = headrace(site, "classify", "--text", "the river", "--text", " ", "--model", "classify")
    assert done.returncode == 1
    assert b"the river" in done.stdout
    assert b"text is empty" in done.stderr
