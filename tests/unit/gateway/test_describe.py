"""What `/metrics` and `/debug` say of the parts; read through stand-ins that have just what is asked for."""

from types import SimpleNamespace
from typing import cast

from gateway.cost_model import MOST_BUCKETS, CostModel, QueueKey
from gateway.describe import Parts
from tests.support.gateway_parts import served


def parts(cost: CostModel) -> Parts:
    """Only what the cost lines need."""
    return cast("Parts", SimpleNamespace(cost=cost, routing=SimpleNamespace(models=lambda: [served(1)])))


def test_the_cost_of_each_bucket_is_told_by_model_and_version() -> None:
    cost = CostModel()
    cost.seed(QueueKey(1), [(1, 0.003), (4, 0.006)])
    cost.seed(QueueKey(1, (3, 128)), [(1, 0.010), (2, 0.015)])
    cost.seed(QueueKey(9), [(1, 0.5), (2, 0.5)])  # a version that is served no more
    found = {labels: round(seconds, 6) for labels, seconds in Parts.costs(parts(cost))}
    version = served(1).version
    assert found == {
        ("words", version, "", "fixed"): 0.002,
        ("words", version, "", "row"): 0.001,
        ("words", version, "3x128", "fixed"): 0.005,
        ("words", version, "3x128", "row"): 0.005,
    }


def test_shapes_that_callers_choose_add_a_bounded_number_of_series() -> None:
    cost = CostModel()
    for size in range(1000):
        cost.observe(QueueKey(1, (size,)), 1, 0.01)
    assert len(list(Parts.costs(parts(cost)))) <= 2 * (1 + MOST_BUCKETS)
