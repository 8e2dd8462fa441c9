"""What `headrace new` writes; that it serves is proven in tests/e2e."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.new_templates import TEMPLATES
from headrace.testing import answer
from shared.errors import ExitCode, StartupError
from shared.repository import Repository
from shared.repository_lock import workplace
from tests.support.command_line import Run
from tests.support.stack import ROOT


@pytest.mark.parametrize("kind", TEMPLATES)
def test_it_is_whole_and_its_own_test_passes(run: Run, tmp_path: Path, kind: str) -> None:
    code, out, err = run("new", "my-model.2", "--from", kind, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert all((tmp_path / file).is_file() for file in told["files"])
    assert f"{Path('models/my-model.2')}/test_my_model_2.py" in told["files"]
    repository = Repository(tmp_path / "models")
    assert repository.current("my-model.2") == told["version"]
    Repository.verify(repository.open("my-model.2"))
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["my-model.2"], "nothing is left beside it"
    (result,) = answer(tmp_path / "models" / "my-model.2")
    assert result
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "models/my-model.2"]
    done = subprocess.run(
        argv, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_it_writes_is_clean(run: Run, tmp_path: Path, kind: str) -> None:
    run("new", "m", "--from", kind)
    config = ROOT / "pyproject.toml"
    # As for our own tests; a pipeline's hooks share one signature; which imports are ours shows only in our own folder.
    ignored = "D,INP001,S101,ARG002,I001"
    argv = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(config), "--ignore", ignored, "models"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    argv = [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "--config", str(config), "models"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_tells_the_next_steps(run: Run) -> None:
    code, out, _ = run("new", "my-classifier")
    assert code == 0
    for step in ("pytest models/my-classifier", "headrace serve", "headrace classify photo.jpg --model my-classifier"):
        assert re.search(rf"^  {step} +# ", out, re.MULTILINE)
    assert "headrace models add my-classifier weights.safetensors" in out
    assert re.search(r"^  headrace models load my-classifier +# where a server runs already", out, re.MULTILINE)


def test_the_next_step_calls_the_server_of_the_settings(run: Run, tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_text("gateway: {http_address: '0.0.0.0:9100', grpc_address: '127.0.0.1:9101'}\n")
    calls = {kind: json.loads(run("new", f"my-{kind}", "--from", kind, "--json")[1])["call"] for kind in TEMPLATES}
    assert all(" http://127.0.0.1:9100/v2/models/" in calls[kind] for kind in ("text", "tensor"))
    assert calls["image"] == "headrace classify photo.jpg --model my-image --address 127.0.0.1:9101"


def test_the_same_again_would_be_the_same_version(run: Run) -> None:
    one, two = (json.loads(run("new", name, "--json")[1])["version"] for name in ("one", "two"))
    assert one == two


def test_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to("nowhere")
    for name in ("mine", "link"):
        code, out, err = run("new", name)
        assert (code, out) == (ExitCode.MODEL_LOAD, "")
        assert err == f"headrace: models/{name} is there already; nothing was changed\n"
    assert list((tmp_path / "models" / "mine").iterdir()) == []
    assert len(list((tmp_path / "models").iterdir())) == 2


@pytest.mark.parametrize("name", ["../x", "a/b", "", "ü", "-x", "x" * 200])
def test_a_bad_name_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    code, _, err = run("new", "--", name)
    assert code == ExitCode.MODEL_LOAD
    assert "can't be a model's name" in err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_is_refused_with_the_nearest(run: Run, tmp_path: Path) -> None:
    code, _, err = run("new", "m", "--from", "imag")
    assert code == ExitCode.BAD_SETTINGS
    assert err == "headrace: --from is 'imag': must be one of image, text, tensor (did you mean image?)\n"
    assert not (tmp_path / "models").exists()


def test_a_repository_that_can_not_be_written_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    code, _, err = run("new", "m")
    assert code == ExitCode.MODEL_LOAD
    assert re.fullmatch(r"headrace: models/m can't be written: [^\n]+\n", err)


def test_a_model_whose_code_is_wrong_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StartupError(ExitCode.MODEL_LOAD, "no weights")

    monkeypatch.setattr("headrace.new_model._save_random_weights", fail)
    assert run("new", "m")[0] == ExitCode.MODEL_LOAD
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_one_left_goes_and_what_a_living_one_builds_stays(run: Run, tmp_path: Path) -> None:
    (tmp_path / "models" / ".new-dead" / "m").mkdir(parents=True)
    with workplace(tmp_path / "models") as living:
        assert run("new", "m")[0] == 0
        assert {path.name for path in (tmp_path / "models").iterdir()} == {"m", living.name}
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["m"]


def test_numbers_that_are_not_finite_fail_a_models_test(run: Run, tmp_path: Path) -> None:
    run("new", "m", "--from", "tensor")
    network = tmp_path / "models" / "m" / "network.py"
    network.write_text(network.read_text().replace("nn.ReLU()", "nn.Threshold(9e9, float('nan'))"))
    with pytest.raises(ValueError, match="model m gives numbers that are not finite"):
        answer(tmp_path / "models" / "m")
