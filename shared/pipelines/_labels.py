"""How many classes a network has, and what they are called. For the pipelines that answer with labels."""

from shared.errors import ExitCode, StartupError


def count_classes(configured: int | None, labels: tuple[str, ...]) -> int:
    """By `preprocessing.classes` and the labels file. Raises StartupError(MODEL_LOAD): unknown or contradictory."""
    if configured is None and not labels:
        raise StartupError(ExitCode.MODEL_LOAD, "the model has no labels file: set preprocessing.classes")
    if configured is not None and labels and configured != len(labels):
        raise StartupError(
            ExitCode.MODEL_LOAD, f"preprocessing.classes is {configured}, but the labels file has {len(labels)} lines"
        )
    return configured or len(labels)
