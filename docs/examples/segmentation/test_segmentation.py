"""Masks by value, by the code that the server runs: `pytest docs/examples/segmentation`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from headrace.testing import answer
from shared.errors import InvalidInput, InvalidOption
from shared.pipeline import RawInput
from shared.repository import Meta
from shared.repository_writer import add_version
from shared.results import Tensors

SOURCE = Path(__file__).parent
COLOURS = {"ground": (128, 128, 128), "red": (220, 30, 30), "green": (30, 200, 40), "blue": (20, 40, 230)}
Mask = npt.NDArray[np.uint8]


def add_weights(repository: Path, folder: Path) -> None:
    """A version whose logits are the squared distances to the colours: what training would find."""
    centres = torch.tensor(list(COLOURS.values())) / 255
    state = {"weight": 2 * centres[:, :, None, None], "bias": -centres.square().sum(1)}
    weights, labels = folder / "model.safetensors", folder / "labels.txt"
    save_file(state, weights)
    labels.write_text("".join(f"{name}\n" for name in COLOURS))
    add_version(repository, "segmentation", {each.name: each for each in (weights, labels)}, Meta(), make_current=True)


def picture(height: int, width: int) -> tuple[bytes, Mask]:
    """Coloured areas as PNG, and which class each pixel is of."""
    mask = np.zeros((height, width), np.uint8)
    mask[height // 4 : height // 2, width // 8 : width // 2] = 1
    mask[height // 2 :, width // 2 :] = 2
    mask[: height // 5, : width // 3] = 3
    pixels = np.array(list(COLOURS.values()), np.uint8)[mask]
    return cv2.imencode(".png", pixels[:, :, ::-1])[1].tobytes(), mask


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Mask]:
    """A picture and options → its mask."""
    repository = tmp_path_factory.mktemp("example") / "models"
    shutil.copytree(SOURCE, repository / "segmentation")
    add_weights(repository, tmp_path_factory.mktemp("weights"))

    def ask(data: bytes, **options: Any) -> Mask:  # noqa: ANN401 - any option
        (result,) = answer(repository / "segmentation", RawInput(kind="image", data=data), options)
        assert isinstance(result, Tensors)
        (mask,) = result.tensors
        assert (mask.name, mask.datatype, mask.shape[0]) == ("mask", "UINT8", 1)
        assert isinstance(mask.data, bytes)
        return np.frombuffer(mask.data, np.uint8).reshape(mask.shape[1:])

    return ask


@pytest.mark.parametrize(("height", "width"), [(128, 128), (96, 128), (128, 31)])
def test_at_the_networks_size_every_pixel_is_right(ask: Callable[..., Mask], height: int, width: int) -> None:
    data, wanted = picture(height, width)
    assert (ask(data) == wanted).all()


def test_a_larger_picture_is_right_but_for_its_edges(ask: Callable[..., Mask]) -> None:
    data, wanted = picture(500, 700)
    full = ask(data)
    assert full.shape == wanted.shape
    assert (full == wanted).mean() > 0.98
    assert ask(data, full_size=False).shape == (91, 128)


def test_what_is_no_picture_and_what_is_no_option_is_refused(ask: Callable[..., Mask]) -> None:
    with pytest.raises(InvalidInput, match="none of JPEG"):
        ask(b"no picture")
    with pytest.raises(InvalidOption, match=r"options\.full_size"):
        ask(picture(64, 64)[0], full_size="yes")
