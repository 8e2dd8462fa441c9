"""The examples of the documentation: their own tests, and each one behind a real server."""

import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as triton  # its gRPC half brings messages of the same names as ours

from headrace import Client, InferenceError
from headrace.client_results import Tensors
from tests.support.pictures import encode, photo, with_orientation
from tests.support.stack import ROOT, Site, serving

EXAMPLES = ROOT / "docs" / "examples"
SEGMENTATION = runpy.run_path(str(EXAMPLES / "segmentation" / "test_segmentation.py"))
Mask = npt.NDArray[np.uint8]


@pytest.mark.parametrize("folder", sorted(EXAMPLES.iterdir()), ids=lambda folder: folder.name)
def test_an_examples_own_tests_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def segmentation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("examples") / "models"
    shutil.copytree(EXAMPLES / "segmentation", root / "segmentation")
    SEGMENTATION["add_weights"](root, tmp_path_factory.mktemp("weights"))
    site = Site(tmp_path_factory.mktemp("site"), root)
    with serving(site):
        yield site


def mask_of(client: Client, data: bytes) -> Mask:
    (result,) = client.predict([data], model="segmentation").results
    assert isinstance(result, Tensors)
    (mask,) = result.tensors
    return np.frombuffer(mask.data, np.uint8).reshape(mask.shape[1:])


def test_masks_of_pictures_of_all_sizes_and_orientations(segmentation: Site) -> None:
    with Client(segmentation.grpc) as client:
        for sides in ((128, 128), (60, 128), (300, 200), (3000, 4000)):
            data, wanted = SEGMENTATION["picture"](*sides)
            mask = mask_of(client, data)
            assert mask.shape == wanted.shape
            assert (mask == wanted).mean() > 0.97
        turned = with_orientation(photo(100, 60), "JPEG", 6)
        assert mask_of(client, turned).shape == (100, 60)


def test_the_protocols_metadata_says_what_comes(segmentation: Site) -> None:
    data, wanted = SEGMENTATION["picture"](96, 128)
    image, large = (triton.InferInput("image", [1, 1], "BYTES") for _ in range(2))
    image.set_data_from_numpy(np.array([[data]], object))
    large.set_data_from_numpy(np.array([[SEGMENTATION["picture"](960, 1280)[0]]], object))
    with triton.InferenceServerClient(segmentation.http) as protocol:
        (declared,) = protocol.get_model_metadata("segmentation")["outputs"]
        answer = protocol.infer("segmentation", [image]).as_numpy("mask")
        small = protocol.infer("segmentation", [large], parameters={"full_size": False}).as_numpy("mask")
    assert declared == {"name": "mask", "datatype": "UINT8", "shape": [-1, -1, -1]}
    assert (answer[0] == wanted).all()
    assert small.shape == (1, 96, 128)


def test_a_bad_picture_does_not_touch_the_others(segmentation: Site) -> None:
    data, wanted = SEGMENTATION["picture"](96, 128)
    given = [data, b"no picture", data, encode(photo(50, 50), "PNG")[:200], data]
    with Client(segmentation.grpc) as client:
        results = client.predict(given, model="segmentation", partial_results=True).results
    assert [isinstance(one, InferenceError) for one in results] == [False, True, False, True, False]
    for one in results[::2]:
        assert isinstance(one, Tensors)
        assert (np.frombuffer(one.tensors[0].data, np.uint8).reshape(96, 128) == wanted).all()
