"""`python -m headrace.import_proof FOLDER RESULT`: load a model's current version, answer one input.

A process of its own: the network is the user's, and may take the process down, or never come back.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from headrace.listing import size_text
from shared.errors import HeadraceError, StartupError
from shared.repository import Repository
from shared.results import Result, Tensors
from shared.settings import Settings
from shared.tensors import DTYPES, SlotRef

_SHOWN = 500
"""Characters of an answer."""


class Proof(msgspec.Struct):
    """What came of it."""

    problem: str = ""
    """One sentence; empty: it serves."""
    rows: int = 0
    batch_s: float = 0.0
    answer: str = ""


def prove(folder: Path) -> Proof:
    """Never raises: what is wrong with the model is its result."""
    from workers.backends.base import NotAsDeclared  # noqa: PLC0415 - imports numpy only when asked for

    try:
        return _prove(folder)
    except StartupError as error:
        return Proof(f"{error.text} ({error.detail})" if error.detail else error.text)
    except HeadraceError as error:
        return Proof(error.text)
    except NotAsDeclared as error:
        return Proof(f"model {folder.name}: {error}")
    except Exception as error:  # noqa: BLE001 - the user's network runs here, and the user is who reads this
        words = " ".join(str(error).split())[:_SHOWN]
        return Proof(f"model {folder.name}: its first batch failed ({type(error).__name__}: {words})")


def _prove(folder: Path) -> Proof:
    from shared.pipeline_loader import load_pipeline  # noqa: PLC0415 - see above
    from workers import host  # noqa: PLC0415
    from workers.backends.torch_device import find  # noqa: PLC0415 - imports torch
    from workers.loading import Loader  # noqa: PLC0415
    from workers.model_pool import Key  # noqa: PLC0415

    version = Repository(folder.parent).open(folder.name)
    pipeline = load_pipeline(version, torch_allowed=False)  # as gateway and pool load it
    loader = Loader(Settings(repository=folder.parent), find("cpu", 0, host.cores()))
    loaded = loader.load(Key(version.name, version.version, version.revision))
    spec, options = pipeline.spec, pipeline.parse_options({})
    out: list[Any] = [
        _zeros(tensor.shape, tensor.datatype) for tensor in spec.inputs if min(tensor.shape, default=0) >= 0
    ]
    prepared = pipeline.preprocess(pipeline.example(), options, out)
    forward = loaded.runner.run([prepared.tensors], len(prepared.tensors[0]), loaded.runner.precision)
    if not forward.finite.all():
        return Proof(f"model {folder.name}: gives numbers that are not finite for its pipeline's example")
    results = pipeline.postprocess([array.copy() for array in forward.outputs], prepared.context, options)
    rows, batch_s = loaded.batch_s[-1]
    return Proof(rows=rows, batch_s=batch_s, answer=told(results[0])[:_SHOWN])


def told(result: Result) -> str:
    """An answer for people: of raw tensors what they are, and none of their bytes."""
    if not isinstance(result, Tensors):
        return str(result)
    return ", ".join(
        f"{one.name} {one.datatype} {list(one.shape)} of {size_text(_size(one.data))}" for one in result.tensors
    )


def _size(data: bytes | SlotRef) -> int:
    return data.nbytes if isinstance(data, SlotRef) else len(data)


def _zeros(shape: tuple[int, ...], datatype: str) -> Any:  # noqa: ANN401 - an array
    import numpy as np  # noqa: PLC0415

    return np.zeros((1, *shape), DTYPES[datatype])


def main() -> None:
    """Entry point."""
    proof = prove(Path(sys.argv[1]))
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(proof))


if __name__ == "__main__":
    main()
