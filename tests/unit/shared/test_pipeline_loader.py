import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.errors import ExitCode, StartupError
from shared.pipeline_loader import KEPT_STATES, built_in_names, load_object, load_pipeline
from shared.repository import Meta, ModelVersion, Repository
from shared.repository_writer import add_version

ROOT = Path(__file__).parents[3]

MINE = """
from typing import Annotated, Any

import msgspec
{top}

from shared.pipeline import Config, Pipeline, PipelineSpec, Prepared, RawInput


class MineConfig(Config, frozen=True):
    size: Annotated[int, msgspec.Meta(ge=1)] = 4


class Mine(Pipeline[Any]):
    config_type = MineConfig

    def __init__(self, config, folder, labels):
        super().__init__(config, folder, labels)
        {init}

    @property
    def spec(self):
        return PipelineSpec(kind="tensors", inputs=(), outputs=())

    def preprocess(self, item, options, out):
        return Prepared([])

    def postprocess(self, outputs, context, options):
        return []

    def example(self):
        return RawInput(kind="tensors")


class Abstract(Pipeline[Any]):
    pass


def function():
    pass
"""

Make = Callable[..., ModelVersion]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(
        pipeline: str = "mine:Mine", more: str = "", *, top: str = "", init: str = "", code: str | None = None
    ) -> ModelVersion:
        folder = tmp_path / "models" / "m"
        folder.mkdir(parents=True)
        (folder / "model.yaml").write_text(f"pipeline: {pipeline}\nbackend: simulated\n{more}")
        (folder / "mine.py").write_text(MINE.format(top=top, init=init or "pass") if code is None else code)
        weights = tmp_path / "simulated.json"
        weights.write_text("{}")
        return add_version(tmp_path / "models", "m", {"simulated.json": weights}, Meta())

    return make


def _refused(version: ModelVersion, *, torch_allowed: bool = True) -> StartupError:
    with pytest.raises(StartupError) as caught:
        load_pipeline(version, torch_allowed=torch_allowed)
    assert "\n" not in caught.value.text
    assert str(version.folder) not in caught.value.text
    return caught.value


def test_a_pipeline_from_the_models_folder(make: Make) -> None:
    pipeline = load_pipeline(make(more="preprocessing: {size: 7}\n"), torch_allowed=True)
    assert type(pipeline).__name__ == "Mine"
    assert pipeline.config.size == 7  # type: ignore[attr-defined]  # the user's own config type
    assert pipeline.folder.name == "m"


def test_two_models_may_each_have_a_file_of_the_same_name(make: Make, tmp_path: Path) -> None:
    version = make()
    other = tmp_path / "models" / "n"
    other.mkdir()
    (other / "mine.py").write_text("Mine = 5\n")
    assert load_object("mine:Mine", other, "n") == 5
    assert load_object("mine:Mine", version.folder, "m").__name__ == "Mine"


def test_a_file_in_the_folder_comes_before_an_importable_module(make: Make) -> None:
    version = make()
    (version.folder / "json.py").write_text("mark = 'mine'\n")
    assert load_object("json:mark", version.folder, "m") == "mine"
    assert load_object("string:digits", version.folder, "m") == "0123456789"


def test_a_module_in_a_subfolder(make: Make) -> None:
    version = make()
    (version.folder / "nets").mkdir()
    (version.folder / "nets" / "small.py").write_text("def build(): return 1\n")
    assert load_object("nets.small:build", version.folder, "m")() == 1


def test_an_unknown_built_in_name_tells_the_line_and_the_nearest(make: Make) -> None:
    error = _refused(make("image_clasification"))
    assert error.exit_code == ExitCode.BAD_SETTINGS
    assert error.text.startswith("m/model.yaml:1: pipeline is 'image_clasification'")
    assert "(did you mean image_classification?)" in error.text


@pytest.mark.parametrize(
    ("block", "line", "words"),
    [
        ("preprocessing:\n  siez: 4\n", 4, "unknown key preprocessing.siez (did you mean size?)"),
        ("preprocessing:\n  size: big\n", 4, "preprocessing.size: expected int, got str"),
        ("preprocessing:\n\n  size: 0\n", 5, "preprocessing.size: expected int >= 1"),
    ],
)
def test_a_mistake_in_preprocessing_tells_line_and_key(make: Make, block: str, line: int, words: str) -> None:
    error = _refused(make(more=block))
    assert error.exit_code == ExitCode.BAD_SETTINGS
    assert error.text.startswith(f"m/model.yaml:{line}: ")
    assert words in error.text.lower() or words in error.text


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ("mine:Mien", "mine has no Mien (did you mean Mine?)"),
        ("nowhere:Mine", "nowhere is neither a file nowhere.py in the model's folder nor importable"),
        ("mine:function", "is not a subclass of shared.pipeline.Pipeline"),
        ("mine:Abstract", "lacks example, postprocess, preprocess, spec"),
        ("os:path", "is not a subclass"),
    ],
)
def test_what_is_no_pipeline_is_refused(make: Make, pipeline: str, words: str) -> None:
    error = _refused(make(pipeline))
    assert error.exit_code == ExitCode.MODEL_LOAD
    assert words in error.text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("this is no python\n", "SyntaxError"),
        ("raise RuntimeError('broken')\n", "mine can't be imported (RuntimeError, see the log)"),
        ("import not_installed_anywhere\n", "imports not_installed_anywhere, which is not installed"),
    ],
)
def test_a_module_that_cannot_be_imported(make: Make, code: str, words: str) -> None:
    assert words in _refused(make(code=code)).text


def test_a_constructor_that_raises(make: Make) -> None:
    with capture_logs() as logged:
        error = _refused(make(init="open(folder / 'vocabulary.txt')"))
    assert error.text == "model m: pipeline mine:Mine can't be built (FileNotFoundError, see the log)"
    assert "/vocabulary.txt" in error.told, "whoever starts the server may know"
    (line,) = logged
    assert isinstance(line["exc_info"], FileNotFoundError)


def test_a_repository_that_is_gone_does_not_tell_callers_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        Repository(tmp_path / "absent")
    assert str(tmp_path) not in caught.value.text
    assert caught.value.told.endswith(f": {tmp_path / 'absent'}")


def test_a_module_that_failed_is_tried_again(make: Make) -> None:
    version = make(code="raise RuntimeError('once')\n")
    _refused(version)
    (version.folder / "mine.py").write_text(MINE.format(top="", init="pass"))
    assert load_pipeline(version, torch_allowed=True)


def test_built_in_names_are_files() -> None:
    assert "image_classification" in built_in_names()
    assert not any(name.startswith("_") for name in built_in_names())


TORCH_FREE = """
import sys
import weakref
from pathlib import Path
from shared.errors import StartupError
from shared.pipeline_loader import load_pipeline
from shared.repository import Repository
for name in ("top", "init", "late", "deep"):
    try:
        load_pipeline(Repository(Path(sys.argv[1])).open(name), torch_allowed=False)
        print(name, "loaded")
    except StartupError as error:
        print(name, int(error.exit_code), error.text)
print("torch" in sys.modules, len([f for f in sys.meta_path if "Torch" in type(f).__name__]))
"""


def test_torch_at_module_level_is_refused_in_a_torch_free_process(tmp_path: Path) -> None:
    kinds = {
        "top": MINE.format(top="import torch", init="pass"),
        "init": MINE.format(top="", init="import torch.nn"),
        "late": MINE.format(top="", init="pass") + "\ndef head():\n    import torch\n",
        "deep": MINE.format(
            top="try:\n    from torch import nn\nexcept ImportError as e:\n    raise RuntimeError from e", init=""
        ),
    }
    weights = tmp_path / "w"
    weights.write_text("{}")
    for name, code in kinds.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "model.yaml").write_text("pipeline: mine:Mine\nbackend: simulated\n")
        (folder / "mine.py").write_text(code)
        add_version(tmp_path / "models", name, {"w": weights}, Meta())
    done = subprocess.run(
        [sys.executable, "-c", TORCH_FREE, str(tmp_path / "models")],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = dict(line.split(" ", maxsplit=1) for line in done.stdout.splitlines())
    for name, module in (("top", "torch"), ("init", "torch"), ("deep", "torch")):
        assert lines[name] == (
            f"4 model {name}: pipeline mine:Mine imports {module} when it is loaded: the gateway and the pool run it "
            "without torch; move the import into `normalise` or `head`, which only the worker calls"
        )
    assert lines["late"] == "loaded"
    assert lines["False"] == "0", "torch stays out, and the guard is gone"


def test_the_default_models_pipeline_loads(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "efficientnet-lite0"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_bytes((ROOT / "models" / "efficientnet-lite0" / "model.yaml").read_bytes())
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"class {index}\n" for index in range(1000)))
    add_version(tmp_path / "models", "efficientnet-lite0", {"labels.txt": labels}, Meta())
    pipeline = load_pipeline(Repository(tmp_path / "models").open("efficientnet-lite0"), torch_allowed=False)
    assert pipeline.spec.inputs[0].shape == (224, 224, 3)
    assert len(pipeline.labels) == 1000


def states_of(path: Path) -> list[object]:
    return [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == str(path)]


def test_a_file_that_is_edited_for_ever_leaves_a_few_states_behind(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    first: list[weakref.ref[object]] = []
    for number in range(3 * KEPT_STATES):
        path.write_text(f"class Found:\n    number = {number}\n")
        found = load_object("edited:Found", tmp_path, "m")
        assert found.number == number
        first.append(weakref.ref(sys.modules[found.__module__]))
        assert len(states_of(path)) <= KEPT_STATES
    del found
    gc.collect()
    assert sum(each() is not None for each in first) == KEPT_STATES
    path.write_text(f"class Found:\n    number = {number - 1}\n")
    again = load_object("edited:Found", tmp_path, "m")
    assert sys.modules[again.__module__] is first[-2](), "the state before the last edit is still there"
    for number in range(100, 99 + KEPT_STATES):
        path.write_text(f"class Found:\n    number = {number}\n")
        load_object("edited:Found", tmp_path, "m")
    assert again.__module__ in sys.modules, "it was the latest again"


def test_the_states_of_another_file_stay(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"class Found:\n    name = {name!r}\n")
    one = load_object("mine:Found", tmp_path / "one", "m")
    for number in range(2 * KEPT_STATES):
        (tmp_path / "other" / "mine.py").write_text(f"class Found:\n    name = {number}\n")
        load_object("mine:Found", tmp_path / "other", "m")
    assert sys.modules[one.__module__].Found is one


def test_an_edit_counts_though_size_and_second_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By these Python tells whether compiled code is fresh."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for word in ("one", "two"):
        path.write_text(f"FOUND = {word!r}\n")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert load_object("mine:FOUND", tmp_path, "m") == word
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine.py"]
