"""The zoo's models that generate text."""

from headrace.zoo_model import ZooModel

MODELS: dict[str, ZooModel] = {}
"""By name."""
