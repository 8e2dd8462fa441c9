"""Thousands of damaged files: each is an image or InvalidInput."""

import numpy as np
import pytest

from shared import images
from shared.errors import InvalidInput
from tests.support.damage import CORPUS, damaged

ROUNDS = 200


@pytest.mark.parametrize("index", range(len(CORPUS)))
def test_damaged_files_give_an_image_or_invalid_input(index: int) -> None:
    images.configure(1_000_000)
    out = np.empty((32, 32, 3), np.uint8)
    for seed in range(ROUNDS):
        data = damaged(CORPUS[index], seed)
        try:
            images.fill_crop(data, out, 0.875)
        except InvalidInput as refused:
            assert refused.text  # noqa: PT017 - both outcomes are allowed
    images.configure(50_000_000)
