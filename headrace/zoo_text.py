"""The zoo's models that read texts and files."""

from headrace.zoo_model import ZooModel

MODELS: dict[str, ZooModel] = {}
"""By name."""
