"""Options that no bound refuses: numbers that are none."""

from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from shared.errors import InvalidOption
from shared.options import finite
from shared.pipeline import Options
from shared.pipelines.image_classification import ImageClassification

NAN, INFINITY = float("nan"), float("inf")


class Sampling(Options, frozen=True):
    threshold: float = 0.5
    penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    weights: tuple[float, ...] = ()
    count: int = 3
    name: str = "nan"


def test_ordinary_options_come_back_as_they_are() -> None:
    options = Sampling(threshold=0.25, weights=(1.0, -2.5))
    assert finite(options) is options


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"threshold": NAN}, "options.threshold is nan: a finite number is needed"),
        ({"penalty": INFINITY}, "options.penalty is inf: a finite number is needed"),
        ({"weights": [1.0, INFINITY]}, "options.weights is inf: a finite number is needed"),
        ({"weights": [-INFINITY]}, "options.weights is -inf: a finite number is needed"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_name(given: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        finite(msgspec.convert(given, Sampling))
    assert refused.value.text == told


def test_every_pipeline_refuses_them_without_a_line_of_its_own() -> None:
    class Own(ImageClassification):
        options_type = Sampling  # type: ignore[assignment]  # a stranger's options

    pipeline = Own(ImageClassification.config_type(), Path(), ("cat", "dog"))
    with pytest.raises(InvalidOption, match=r"options\.threshold is nan"):
        pipeline.parse_options({"threshold": NAN})
