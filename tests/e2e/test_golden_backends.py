"""One network in three forms behind one server: weights for a factory, a torch.export archive, an ONNX file."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace import Client
from headrace.client_results import Classified
from headrace.import_config import Shape, draft, look
from headrace.zoo import Photo, fetch_photos
from shared.repository import Meta, Repository
from shared.repository_writer import add_version
from tests.support.stack import ROOT, Site, serving
from workers.networks.efficientnet_lite import efficientnet_lite0

NAME = "efficientnet-lite0"
FORMS = ("weights", "archive", "onnx")
MEAN, STD = (127.0, 127.0, 127.0), (128.0, 128.0, 128.0)

Answers = dict[str, list[Classified]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported as a user does it, with the model.yaml that an import writes (which would try each one for seconds)."""
    folder, root = tmp_path_factory.mktemp("exports"), tmp_path_factory.mktemp("golden") / "models"
    version = Repository(ROOT / "models").open(NAME)
    network = efficientnet_lite0().eval()
    network.load_state_dict(load_file(version.files / "model.safetensors"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        example = (torch.zeros(2, 3, 224, 224),)
        program = torch.export.export(network, example, dynamic_shapes=({0: torch.export.Dim("rows")},))
        torch.export.save(program, folder / "lite0.pt2")
        onnx = torch.onnx.export(program, dynamo=True, input_names=["image"], output_names=["logits"], verbose=False)
        assert onnx is not None
        onnx.save(folder / "lite0.onnx", external_data=True)
    (root / "weights").mkdir(parents=True)
    (root / "weights" / "model.yaml").write_bytes(version.config_bytes)
    add_version(root, "weights", {name: version.files / name for name in version.meta.files}, Meta())
    for name, file in (("archive", "lite0.pt2"), ("onnx", "lite0.onnx")):
        found = look(folder / file)
        assert found.inputs[0].shape == (-1, 3, 224, 224)
        (root / name).mkdir()
        made = draft(found, Shape(mean=MEAN, std=STD, trust="code"), version.labels())
        (root / name / "model.yaml").write_text(made.text)
        files = {each: folder / each for each in (file, *found.external)}
        add_version(root, name, {**files, "labels.txt": version.files / "labels.txt"}, Meta())
    return root


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"), repository, batching={"max_rows": 4})
    with serving(site):
        yield site


@pytest.fixture(scope="module")
def photos() -> list[Photo]:
    return fetch_photos(ROOT / "models")


def asked(client: Client, name: str, photos: list[Photo]) -> list[Classified]:
    outcomes = sorted(
        client.classify_many([photo.path for photo in photos], model=name, top_k=5), key=lambda each: each.index
    )
    assert not [each.error for each in outcomes if each.error is not None]
    return [each.result for each in outcomes if each.result is not None]


@pytest.fixture(scope="module")
def answers(site: Site, photos: list[Photo]) -> Answers:
    with Client(site.grpc, timeout_s=30.0) as client:
        return {name: asked(client, name, photos) for name in FORMS}


@pytest.mark.parametrize("name", FORMS[1:])
def test_every_form_gives_the_same_answers(answers: Answers, name: str) -> None:
    assert len(answers["weights"]) == 20
    for golden, answer in zip(answers["weights"], answers[name], strict=True):
        assert answer.top.index == golden.top.index
        assert answer.top.name == golden.top.name
        scores = {label.index: label.score for label in answer.labels}
        for label in golden.labels[:3]:
            assert scores[label.index] == pytest.approx(label.score, abs=1e-3)
        np.testing.assert_allclose(
            [label.score for label in answer.labels], [label.score for label in golden.labels], atol=1e-3
        )


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_right(answers: Answers, photos: list[Photo], name: str) -> None:
    right = [answer.top.index == photo.label for answer, photo in zip(answers[name], photos, strict=True)]
    assert sum(right) >= 17


def test_each_says_which_version_answered(answers: Answers, repository: Path) -> None:
    found = Repository(repository)
    assert {name: answers[name][0].version for name in FORMS} == {name: found.current(name) for name in FORMS}
