"""The default model through the whole stack: right answers, equal to a reference, equal alone and in company."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from headrace import Client
from headrace.client_results import Classified
from headrace.zoo import Photo, fetch_photos
from shared.repository import Repository
from tests.support.stack import ROOT, Site, serving
from workers.networks.efficientnet_lite import efficientnet_lite0

pytestmark = pytest.mark.alone  # company in a batch is a matter of time

NAME = "efficientnet-lite0"
CROP, SIZE = 0.875, 224


@pytest.fixture(scope="module")
def real_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("real"), ROOT / "models", models=[NAME])
    with serving(site):
        yield site


@pytest.fixture(scope="module")
def photos() -> list[Photo]:
    return fetch_photos(ROOT / "models")


@pytest.fixture(scope="module")
def answers(real_site: Site, photos: list[Photo]) -> dict[Path, Classified]:
    """One photo at a time."""
    with Client(real_site.grpc) as client:
        return {photo.path: client.classify(photo.path, top_k=5) for photo in photos}


def reference(paths: list[Path]) -> list[int]:
    """Top-1 of the same weights behind Pillow's bicubic resize and centre crop, without any part of the server."""
    network = efficientnet_lite0().eval()
    network.load_state_dict(load_file(Repository(ROOT / "models").open(NAME).files / "model.safetensors"))
    images = []
    for path in paths:
        image = Image.open(path).convert("RGB")
        short = round(SIZE / CROP)
        scale = short / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        left, top = (image.width - SIZE) // 2, (image.height - SIZE) // 2
        images.append(np.asarray(image.crop((left, top, left + SIZE, top + SIZE))))
    batch = (torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() - 127) / 128
    with torch.inference_mode():
        return [int(index) for index in network(batch).argmax(1)]


def test_at_least_17_of_20_are_right(answers: dict[Path, Classified], photos: list[Photo]) -> None:
    right = [answers[photo.path].top.index == photo.label for photo in photos]
    assert len(right) == 20
    assert sum(right) >= 17, [(p.path.name, answers[p.path].top) for p in photos]


def test_at_least_19_of_20_agree_with_the_reference(answers: dict[Path, Classified]) -> None:
    paths = list(answers)
    agree = [answers[path].top.index == index for path, index in zip(paths, reference(paths), strict=True)]
    assert sum(agree) >= 19


def batches(site: Site) -> int:
    """That came back so far."""
    line = f'headrace_batch_rows_count{{model="{NAME}"}} '
    return next(int(float(each.removeprefix(line))) for each in site.get("/metrics")[1].splitlines() if line in each)


def test_alone_and_in_company_agree(real_site: Site, answers: dict[Path, Classified]) -> None:
    before = batches(real_site)
    with Client(real_site.grpc) as client:
        together = client.predict([path.read_bytes() for path in answers], options={"top_k": 5})
    assert batches(real_site) - before <= len(answers) // 2, "most had company"
    for alone, result in zip(answers.values(), together.results, strict=True):
        assert [label.index for label in result.labels] == [label.index for label in alone.labels]  # type: ignore[union-attr]  # all are classifications
        scores = np.array([label.score for label in result.labels])  # type: ignore[union-attr]  # as above
        np.testing.assert_allclose(scores, [label.score for label in alone.labels], atol=1e-5)


def test_labels_have_names(answers: dict[Path, Classified]) -> None:
    assert {label.name for answer in answers.values() for label in answer.labels} >= {"Dalmatian", "strawberry"}
