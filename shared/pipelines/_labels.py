"""What pipelines that answer with labels share: how many classes, which are the best, what they are called."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shared.errors import ExitCode, InvalidOption, StartupError
from shared.results import Label
from shared.tensors import TensorSpec

if TYPE_CHECKING:
    import torch


def count_classes(configured: int | None, labels: tuple[str, ...]) -> int:
    """By `preprocessing.classes` and the labels file. Raises StartupError(MODEL_LOAD): unknown or contradictory."""
    if configured is None and not labels:
        raise StartupError(ExitCode.MODEL_LOAD, "the model has no labels file: set preprocessing.classes")
    if configured is not None and labels and configured != len(labels):
        raise StartupError(
            ExitCode.MODEL_LOAD, f"preprocessing.classes is {configured}, but the labels file has {len(labels)} lines"
        )
    return configured or len(labels)


def best_specs(classes: int, max_top_k: int) -> tuple[TensorSpec, TensorSpec]:
    """What leaves the worker: `scores` FP32 [k] and `classes` INT32 [k], best first."""
    k = min(max_top_k, classes)
    return (
        TensorSpec(name="scores", datatype="FP32", shape=(k,)),
        TensorSpec(name="classes", datatype="INT32", shape=(k,), maximum=classes),
    )


def check_top_k(given: dict[str, Any], top_k: int, most: int) -> None:
    """Refuses more classes than leave the worker, where a request asks for them itself. Raises InvalidOption."""
    if "top_k" in given and top_k > most:
        raise InvalidOption(f"options.top_k is {top_k}: this model gives at most {most} (preprocessing.max_top_k)")


def class_scores(outputs: "tuple[torch.Tensor, ...]", classes: int, dimensions: int = 2) -> "torch.Tensor":
    """The network's first output in float32, its last dimension one number a class. Raises ValueError."""
    scores = outputs[0].float()
    if scores.ndim != dimensions or scores.shape[-1] != classes:
        raise ValueError(f"the network gives {list(scores.shape[1:])} numbers a row, labels say {classes}")
    return scores


def best_of(probabilities: "torch.Tensor", k: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """The k best of [n, classes]: probabilities [n, k] and int32 class numbers [n, k], best first."""
    best = probabilities.topk(k, dim=1)
    return best.values, best.indices.int()


def named(names: tuple[str, ...], classes: Iterable[int], scores: Iterable[float]) -> list[Label]:
    """Class numbers as labels; those without a name have an empty one."""
    return [
        Label(index, names[index] if index < len(names) else "", score)
        for index, score in zip(classes, scores, strict=True)
    ]
