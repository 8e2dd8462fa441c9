"""`headrace models …`, as a user types it, on a repository of the test's own."""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from headrace import listing, zoo
from shared.errors import ExitCode
from shared.repository import Repository
from shared.repository_writer import change_traffic
from shared.traffic import Canary, Why, start_canary, switch
from tests.support.command_line import Run


@pytest.fixture
def three(run: Run, models: Path, tmp_path: Path) -> list[str]:
    """Three more versions of `good`, whose first one is current."""
    versions = []
    for number, scale in enumerate((1.0, 2.0, 3.0)):
        weights = tmp_path / "w.safetensors"
        tensors = {"body": np.full((3, 2), scale, np.float32), "head": np.zeros(4 + number, np.float32)}
        weights.write_bytes(save(tensors))
        code, out, err = run(
            "models", "add", "good", str(weights), "--data-version", f"2026-1{number}", "--metric", f"top1=0.{number}",
            "--metric", "loss=1", "--param", "lr=0.001", "--param", f"layers=[{number}, 2]", "--param", "name=adam",
            "--owner", "vision", "--licence", "MIT", "--json",
        )  # fmt: skip
        assert code == 0, err
        versions.append(json.loads(out)["version"])
    return versions


def numbers(value: float) -> bytes:
    return save({"w": np.array([value], np.float32)})


def told(run: Run, *arguments: str) -> Any:  # noqa: ANN401 - any JSON
    """What a command says with `--json`."""
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_models_list_as_table_and_json(run: Run, models: Path) -> None:
    (models / "bad").mkdir()
    (models / "bad" / "model.yaml").write_text("pipelin: x\n")
    (models / "empty").mkdir()
    (models / "empty" / "model.yaml").write_text("pipeline: tensor\nbackend: simulated\n")
    code, out, _ = run("models", "list")
    assert code == 0
    assert re.search(r"good +[0-9a-f]{16} +● current +tensor", out)
    assert "✗ model empty has no version yet" in out
    rows = {row["name"]: row for row in json.loads(run("models", "list", "--json")[1])}
    assert rows["good"]["current"] is True
    assert rows["good"]["source"] == "here"
    assert rows["empty"]["problem"]


def test_models_list_shows_a_bad_model_beside_the_good_ones(run: Run, models: Path) -> None:
    (models / "good" / "model.yaml").write_text("pipelin: x\n")
    rows = json.loads(run("models", "list", "--json")[1])
    assert rows[0]["problem"].startswith("good/model.yaml:1: unknown key pipelin")


def test_models_list_shows_what_is_good_beside_a_current_version_that_is_missing(
    run: Run, models: Path, three: list[str]
) -> None:
    current = Repository(models).current("good")
    change_traffic(models, "good", lambda before: switch(before, three[0], Why("now", "me")))
    shutil.rmtree(models / "good" / "versions" / three[0])
    rows = {row["version"]: row for row in told(run, "models", "list")}
    assert set(rows) == {current, *three}
    assert (rows[current]["role"], rows[current]["problem"], rows[current]["pipeline"]) == ("standby", "", "tensor")
    assert rows[three[0]]["role"] == "current"
    way_out = "`headrace traffic good --to HASH` writes it anew (`headrace models list` shows the versions)"
    assert rows[three[0]]["problem"] == f"good/versions/{three[0]}: is missing; {way_out}"
    assert told(run, "models", "show", "good", current)["version"] == current
    assert "is no version of good; `headrace traffic good --to HASH`" in run("models", "show", "good")[2]
    assert told(run, "traffic", "good", "--rollback")["current"] == current
    assert "`headrace traffic good --drop-standby` gives it up" in run("models", "list")[1]


def test_models_list_shows_the_versions_beside_a_traffic_json_that_is_damaged(
    run: Run, models: Path, three: list[str]
) -> None:
    (models / "good" / "traffic.json").write_text("{")
    *rows, fault = told(run, "models", "list")
    assert {(row["role"], row["problem"]) for row in rows} == {("", "")}
    assert set(three) < {row["version"] for row in rows}
    assert fault["problem"].startswith("good/traffic.json: ")
    way_out = "`headrace traffic good --to HASH` writes it anew"
    assert way_out in fault["problem"]
    for command in (["traffic", "good"], ["traffic", "good", "--rollback"], ["models", "history", "good"]):
        assert way_out in run(*command)[2]
    assert told(run, "traffic", "good", "--to", three[1])["current"] == three[1]
    assert (models / "good" / "traffic.json.damaged").read_text() == "{"
    assert {row["problem"] for row in told(run, "models", "list")} == {""}


def test_models_list_without_any(run: Run, tmp_path: Path) -> None:
    code, _, err = run("models", "list")
    assert code == ExitCode.BAD_SETTINGS
    assert "headrace models fetch" in err
    (tmp_path / "models").mkdir()
    assert "headrace models fetch" in run("models", "list")[1]
    assert json.loads(run("models", "list", "--json")[1]) == []


def test_models_list_tells_roles_owners_and_metrics(run: Run, models: Path, three: list[str]) -> None:
    canary = Canary(version=three[0], percent=12.5)
    change_traffic(models, "good", lambda before: start_canary(before, canary, Why("now", "test")))
    rows = {row["version"]: row for row in told(run, "models", "list")}
    assert rows[three[0]]["role"] == "canary"
    assert rows[three[0]]["percent"] == 12.5
    assert rows[three[1]]["role"] == ""
    assert rows[three[1]]["metrics"] == {"top1": 0.1, "loss": 1.0}
    assert rows[three[1]]["owner"] == "vision"
    assert [row["current"] for row in rows.values()].count(True) == 1
    out = run("models", "list")[1]
    assert re.search(rf"good +{three[0]} +canary 12\.5 % +tensor .* vision +top1 0, loss 1", out)


def test_models_list_in_a_narrow_terminal_keeps_hashes_whole(
    run: Run, three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    out = run("models", "list")[1]
    assert all(version in out for version in three)
    assert "vision" not in out


def test_a_first_version_is_current_and_a_later_one_is_not(run: Run, models: Path, tmp_path: Path) -> None:
    (models / "fresh").mkdir()
    (models / "fresh" / "model.yaml").write_text("pipeline: tensor\nbackend: simulated\n")
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(numbers(1))
    first = told(run, "models", "add", "fresh", str(weights))
    assert (first["current"], first["present"]) == (True, False)
    weights.write_bytes(numbers(2))
    code, out, _ = run("models", "add", "fresh", str(weights))
    assert code == 0
    second = next(version for version in Repository(models).versions("fresh") if version != first["version"])
    assert "answers nobody yet" in out
    assert f"headrace traffic fresh --canary {second} --percent 5" in out
    assert f"headrace traffic fresh --to {second}" in out
    assert Repository(models).current("fresh") == first["version"]
    again = told(run, "models", "add", "fresh", str(weights))
    assert (again["version"], again["current"], again["present"]) == (second, False, True)
    assert told(run, "models", "add", "fresh", str(weights), "--current")["current"] is True
    assert Repository(models).current("fresh") == second
    assert Repository(models).traffic("fresh").standby == first["version"]


def test_the_same_content_again_is_told_and_nothing_of_it_changes(run: Run, models: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(numbers(1))
    first = told(run, "models", "add", "good", str(weights), "--owner", "ada")["version"]
    words = f"✓ good {first} was already stored in models; its facts (owner, metrics …) stay as they were"
    out = run("models", "add", "good", str(weights), "--owner", "bob")[1]
    assert out.splitlines()[0] == words
    assert f"headrace traffic good --to {first}" in out
    out = run("models", "add", "good", str(weights), "--owner", "bob", "--current")[1]
    assert out.splitlines() == [words, f"✓ good {first} is current in models"]
    assert told(run, "models", "show", "good", first)["meta"]["owner"] == "ada"


def test_weights_that_were_not_saved_to_the_end_are_not_stored(run: Run, models: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(numbers(1)[:-1])
    code, out, err = run("models", "add", "good", str(weights))
    assert (code, out) == (ExitCode.MODEL_LOAD, "")
    assert err == (
        f"headrace: {weights}: is cut off: its tensors have 4 bytes, of which 3 are there; was it saved to the end?\n"
    )
    assert len(Repository(models).versions("good")) == 1


@pytest.mark.parametrize(
    ("name", "shown"), [("a" * 200, f"'{'a' * 100}' (200 characters)"), ("café", "'café'"), ("a\x1b", r"'a\x1b'")]
)
def test_a_name_that_can_not_be_one_is_shown_as_it_is_with_the_limit(
    run: Run, models: Path, tmp_path: Path, name: str, shown: str
) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(numbers(1))
    for command in (("models", "add", name, str(weights)), ("models", "import", name, str(weights)), ("new", name)):
        code, _, err = run(*command)
        assert code in {ExitCode.MODEL_LOAD, ExitCode.BAD_SETTINGS}
        assert err.startswith(f"headrace: {shown} can't be a model's name: at most 128 letters, digits and . _ - only")


def test_models_add_keeps_what_it_was_told(run: Run, three: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "deep").mkdir(parents=True)
    (folder / "w.safetensors").write_bytes(numbers(3))
    (folder / "deep" / "labels.txt").write_text("a\n")
    version = told(run, "models", "add", "good", str(folder), "--parent", three[1][:6])["version"]
    shown = told(run, "models", "show", "good", version[:5])
    assert shown["meta"]["parent"] == three[1]
    assert sorted(file["name"] for file in shown["files"]) == ["deep/labels.txt", "w.safetensors"]
    meta = told(run, "models", "show", "good", three[2])["meta"]
    assert meta["hyperparameters"] == {"lr": 0.001, "layers": [2, 2], "name": "adam"}
    assert meta["metrics"] == {"top1": 0.2, "loss": 1.0}
    assert (meta["data_version"], meta["licence"], meta["source"]) == ("2026-12", "MIT", "headrace models add")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--metric", "top1"), "--metric is 'top1': must be like accuracy=0.962"),
        (("--metric", "=1"), "must be like"),
        (("--metric", "top1=high"), "--metric 'top1' is 'high': must be a finite number"),
        (("--metric", "top1=nan"), "must be a finite number"),
        (("--metric", "a=1", "--metric", "a=2"), "--metric 'a' is given twice"),
        (("--param", "lr"), "--param is 'lr': must be like lr=0.001"),
        (("--param", "lr=1", "--param", "lr=2"), "--param 'lr' is given twice"),
        (("--parent", "ffff"), "model good has no such version"),
        (("--parent", "3f"), "4 digits of its hash or more"),
    ],
)
def test_models_add_refuses_what_it_can_not_keep(
    run: Run, models: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(numbers(3))
    code, out, err = run("models", "add", "good", str(weights), *arguments)
    assert code in {ExitCode.BAD_SETTINGS, ExitCode.MODEL_LOAD}
    assert out == ""
    assert re.fullmatch(r"headrace: [^\n]+\n", err)
    assert words in err
    assert len(Repository(models).versions("good")) == 1


def test_models_add_refuses_pickles_missing_files_and_unknown_models(run: Run, models: Path, tmp_path: Path) -> None:
    pickle = tmp_path / "model_final_v2_new.pt"
    pickle.write_bytes(b"x")
    code, _, err = run("models", "add", "good", str(pickle))
    assert code == ExitCode.BAD_SETTINGS
    assert "save_file" in err
    absent = tmp_path / "absent.safetensors"
    code, _, err = run("models", "add", "good", str(absent))
    assert (code, err) == (ExitCode.MODEL_LOAD, f"headrace: there is no file {absent}\n")
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(numbers(3))
    for name in ("nobody", "../good", "a b"):
        code, _, err = run("models", "add", name, str(weights))
        assert code == ExitCode.MODEL_LOAD
        assert name in err
    code, _, err = run("models", "add", "nobody", str(weights))
    assert "`headrace new nobody`" in err
    assert "`headrace models import nobody FILE`" in err
    assert len(list((models / "good" / "versions").iterdir())) == 1


def test_models_add_refuses_an_onnx_file_that_reads_another_one(run: Run, models: Path, tmp_path: Path) -> None:
    bad = tmp_path / "model.onnx"
    bad.write_bytes(b"no protobuf")
    code, _, err = run("models", "add", "good", str(bad))
    assert code == ExitCode.MODEL_LOAD
    assert err.startswith("headrace: model.onnx: ")
    assert len(list((models / "good" / "versions").iterdir())) == 1


def test_models_show_tells_everything(run: Run, models: Path, three: list[str]) -> None:
    canary = Canary(version=three[2], percent=5, by="request_id")
    change_traffic(models, "good", lambda before: start_canary(before, canary, Why("now", "me", "why not")))
    code, out, _ = run("models", "show", "good", three[2][:4])
    assert code == 0
    for words in ("canary", "vision", "2026-12", "metric top1", "0.2", "parameter layers", "[2,2]", "w.safetensors"):
        assert words in out
    assert re.search(rf"canary +{three[2]} +5 % by request_id", out)
    assert re.search(r"● current +[0-9a-f]{16} +95 %", out)
    assert re.search(rf"now +canary 5 % +[0-9a-f]{{16}} +{three[2]} +me +why not", out)
    shown = told(run, "models", "show", "good")
    assert (shown["role"], shown["pipeline"], shown["meta"]["source"]) == ("current", "tensor", "here")
    assert shown["traffic"]["canary"]["percent"] == 5
    assert shown["files"] == [{"name": "simulated.json", "nbytes": 2, "sha256": shown["files"][0]["sha256"]}]


def test_models_history(run: Run, models: Path, three: list[str]) -> None:
    figures = {"errors": 7, "p99_ms": 12.5}
    canary = Canary(version=three[2], percent=5)
    why = Why("2026-11-30T12:00:00Z", "guard", "too many errors", figures)
    change_traffic(models, "good", lambda before: start_canary(before, canary, why))
    out = run("models", "history", "good")[1]
    assert re.search(r"guard +too many errors: errors 7, p99_ms 12.5", out)
    history = told(run, "models", "history", "good")
    assert [change["action"] for change in history] == ["switch", "canary"]
    assert history[-1]["figures"] == figures
    (models / "fresh").mkdir()
    (models / "fresh" / "model.yaml").write_text("pipeline: tensor\nbackend: simulated\n")
    assert "has never changed" in run("models", "history", "fresh")[1]
    assert told(run, "models", "history", "fresh") == []


def test_models_diff(run: Run, three: list[str]) -> None:
    code, out, _ = run("models", "diff", "good", three[0][:6], three[2][:6])
    assert code == 0
    assert re.search(r"data_version +2026-10 +2026-12", out)
    assert re.search(r"metrics.top1 +0.0 +0.2 +\+0.2", out)
    assert re.search(r"hyperparameters.layers +\[0,2\] +\[2,2\]", out)
    assert "hyperparameters.lr" not in out
    assert re.search(r"head +F32 \[4\] +F32 \[6\]", out)
    assert "1 tensors have the same shape and datatype; which of their 6 numbers differ is not looked at" in out
    found = told(run, "models", "diff", "good", three[0], three[2])
    assert found["weights"][0]["unread_values"] == 6
    assert {"what": "metrics.top1", "before": 0.0, "after": 0.2} in found["differences"]
    assert "do not differ" in run("models", "diff", "good", three[0], three[0])[1]
    code, _, err = run("models", "diff", "good", three[0], "ffff")
    assert (code, "ffff" in err) == (ExitCode.MODEL_LOAD, True)


def test_models_diff_of_a_broken_file_names_it(run: Run, models: Path, three: list[str]) -> None:
    path = models / "good" / "versions" / three[0] / "w.safetensors"
    path.chmod(0o644)
    path.write_bytes(struct.pack("<Q", 5) + b"x")
    code, _, err = run("models", "diff", "good", three[0], three[1])
    assert code == ExitCode.MODEL_LOAD
    words = "is no safetensors file, or cut off: its header has 5 bytes, of which 1 are there"
    assert f"good/versions/{three[0]}/w.safetensors: {words}" in err


def test_models_verify_reads_every_byte(run: Run, models: Path, three: list[str]) -> None:
    assert "✓ 4 versions" in run("models", "verify")[1]
    whole = told(run, "models", "verify")
    assert (whole["versions"], whole["faults"]) == (4, [])
    assert whole["nbytes"] == sum(
        path.stat().st_size for path in (models / "good" / "versions").glob("*/*") if path.name != "meta.json"
    )
    assert told(run, "models", "verify", "good") == whole


def test_models_verify_tells_every_fault_on_a_line_of_its_own(run: Run, models: Path, three: list[str]) -> None:
    home = models / "good" / "versions"
    flipped = home / three[0] / "w.safetensors"
    flipped.chmod(0o644)
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"x")
    (home / three[1] / "w.safetensors").unlink()
    (home / three[2] / "meta.json").write_text("{}")
    traffic = models / "good" / "traffic.json"
    traffic.write_text(traffic.read_text().replace('"standby": ""', '"standby": "0000000000000000"'))
    code, out, _ = run("models", "verify")
    assert code == 1
    lines = sorted(out.splitlines())
    assert len(lines) == 4
    assert [line.startswith("✗ good/") for line in lines] == [True] * 4
    assert f"{three[0]}/w.safetensors: has changed" in out
    assert f"{three[1]}/w.safetensors: is missing" in out
    assert f"{three[2]}/meta.json: file hashes, digest and the folder's name do not agree" in out
    assert "'0000000000000000' has a part in the traffic" in out
    code, out, _ = run("models", "verify", "good", "--json")
    assert code == 1
    assert {fault["version"] for fault in json.loads(out)["faults"]} == {"", *three}
    code, _, err = run("models", "verify", "nobody")
    assert (code, "nobody" in err) == (ExitCode.MODEL_LOAD, True)


def test_models_verify_needs_no_model_yaml_that_is_right(run: Run, models: Path, three: list[str]) -> None:
    (models / "good" / "model.yaml").write_text("pipelin: x\n")
    assert told(run, "models", "verify")["versions"] == 4


def test_models_remove(run: Run, models: Path, three: list[str]) -> None:
    current = Repository(models).current("good")
    code, out, err = run("models", "remove", "good", current[:4])
    assert (code, out) == (ExitCode.MODEL_LOAD, "")
    assert f"version {current} of good is in use (current)" in err
    removed = told(run, "models", "remove", "good", three[0][:4])
    assert (removed["name"], removed["version"], removed["nbytes"] > 0) == ("good", three[0], True)
    assert f"good {three[1]} is removed" in run("models", "remove", "good", three[1])[1]
    assert Repository(models).versions("good") == sorted([current, three[2]])
    assert run("models", "remove", "good", three[1])[0] == ExitCode.MODEL_LOAD


def test_models_gc(run: Run, models: Path, three: list[str]) -> None:
    dry = told(run, "models", "gc", "--keep", "1", "--dry-run")
    assert len(Repository(models).versions("good")) == 4
    assert {found["version"] for found in dry["removed"]} == set(three[:2])
    assert dry["nbytes"] == sum(found["nbytes"] for found in dry["removed"]) > 0
    out = run("models", "gc", "good", "--keep", "1")[1]
    assert f"good {three[0]} is removed" in out
    assert "are free again" in out
    assert Repository(models).versions("good") == sorted([Repository(models).current("good"), three[2]])
    assert "nothing to remove" in run("models", "gc", "--keep", "1")[1]
    left = models / "good" / "versions" / ".new-0123456789abcdef-0000"
    left.mkdir()
    (left / "half").write_bytes(b"x" * 200)
    assert "what a crashed writer left is removed (0.2 kB)" in run("models", "gc")[1]
    assert run("models", "gc", "nobody")[0] == ExitCode.MODEL_LOAD
    assert run("models", "gc", "--keep", "-1")[0] == ExitCode.BAD_SETTINGS


def test_models_fetch(run: Run, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, repository: Path, report: zoo.Report) -> object:
        asked.append((name, repository))
        report("downloading")
        return listing.Repository(models).open("good")

    monkeypatch.setattr(zoo, "fetch", fetch)
    monkeypatch.setattr(zoo, "fetch_photos", lambda repository, _report: [zoo.Photo(repository / "a.jpg", 1)])
    code, out, _ = run("models", "fetch")
    assert (code, asked) == (0, [("efficientnet-lite0", Path("models"))])
    assert "✓ good" in out
    monkeypatch.setitem(zoo.MODELS, "other", zoo.MODELS["efficientnet-lite0"])
    code, out, err = run("models", "fetch", "other", "efficientnet-lite0", "other", "--photos", "--json")
    assert json.loads(out)["photos"] == ["models/a.jpg"]
    assert [name for name, _ in asked[1:]] == ["other", "efficientnet-lite0"]
    assert err == "", "what happens is shown on terminals only"


@pytest.mark.parametrize("names", [("resnet",), ("builtin", "resnet"), ("efficientnet-lite0", "[red]", "resnet")])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_models_fetch_of_an_unknown_name_fetches_nothing(
    run: Run, tmp_path: Path, names: tuple[str, ...], form: tuple[str, ...]
) -> None:
    code, out, err = run("models", "fetch", *names, *form)
    assert (code, out) == (ExitCode.BAD_SETTINGS, "")
    unknown = "[red]" if "[red]" in names else "resnet"
    known = ", ".join([*zoo.MODELS, "builtin"])
    assert err == f"headrace: models fetch: '{unknown}' is not known (known: {known})\n"
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", ["builtin", "efficientnet-lite0"])
def test_models_fetch_into_what_is_no_folder(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "models").write_text("a file")
    (tmp_path / ".cache").write_text("another one")
    code, out, err = run("models", "fetch", name, "--json")
    assert (code, out) == (ExitCode.MODEL_LOAD, "")
    assert re.fullmatch(r"headrace: models fetch: [^\n]*(models/identity|\.cache): [^\n]+\n", err)


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """Rows of four numbers in, the same out."""
    from onnx import TensorProto, helper  # noqa: PLC0415 - only for these tests

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", value[:1], value[1:])
    path = tmp_path / "net.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return path


def test_models_import_makes_a_model_and_then_a_version(run: Run, models: Path, onnx_file: Path) -> None:
    code, out, err = run("models", "import", "fresh", str(onnx_file), "--metric", "top1=0.5", "--owner", "me")
    assert code == 0, err
    assert re.search(r"✓ fresh [0-9a-f]{16} is current in models", out)
    assert "takes x FP32 [-1, 4]" in out
    assert "gives y FP32 [-1, 4]" in out
    assert re.search(r"answered a batch of \d+ in .* on this CPU: y FP32 \[1, 4\] of 16 B\n", out), out
    assert "model.yaml is new: pipeline tensor, backend onnxruntime" in out
    first = Repository(models).current("fresh")
    assert Repository(models).open("fresh").meta.metrics == {"top1": 0.5}
    onnx_file.write_bytes(onnx_file.read_bytes() + b"\x22\x01m")  # another `domain`, so another version
    second = told(run, "models", "import", "fresh", str(onnx_file), "--parent", first[:4], "--current")
    assert (second["current"], second["new_config"]) == (True, False)
    repository = Repository(models)
    assert repository.current("fresh") == second["version"] != first
    assert repository.open("fresh").meta.parent == first
    assert "is current" in run("models", "import", "fresh", str(onnx_file))[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pipeline", "sound"), "--pipeline is 'sound': see `headrace models import --help`"),
        (("--trust", "me"), "--trust is 'me'"),
        (("--mean", "1,2"), "--mean is '1,2': must be three numbers like 127,127,127"),
        (("--std", "a,b,c"), "--std is 'a,b,c': must be three numbers"),
        (("--metric", "x"), "--metric is 'x'"),
        (("--labels", "absent.txt"), "absent.txt"),
    ],
)
def test_models_import_refuses_options_with_one_line(
    run: Run, models: Path, onnx_file: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = run("models", "import", "fresh", str(onnx_file), *arguments)
    assert code in {ExitCode.BAD_SETTINGS, ExitCode.MODEL_LOAD}
    assert out == ""
    assert re.fullmatch(r"headrace: [^\n]+\n", err)
    assert words in err
    assert [path.name for path in models.iterdir()] == ["good"]
