"""A start that can't work ends at once, with an exit code and a line that says what to do."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from headrace import Client, InferenceError
from tests.support.stack import Process, Site, simulated_repository

RAISING_PIPELINE = """
from shared.pipelines.tensor import TensorPipeline
from shared.pipeline import Config, Pipeline

class Own(Pipeline):
    @property
    def spec(self): raise ValueError("no spec today")
    def preprocess(self, item, options, out): ...
    def postprocess(self, outputs, context, options): ...
    def example(self): ...
"""

AT_ONCE_S = 10.0  # of interpreter start and imports on a busy machine; a person would call it at once


def end_of(process: Process) -> tuple[int, str]:
    with process:
        return process.wait(AT_ONCE_S), process.output()


def change(site: Site, **groups: Any) -> None:  # noqa: ANN401 - any setting
    settings = json.loads(site.config.read_text())
    for name, value in groups.items():
        if isinstance(value, dict):
            settings.setdefault(name, {}).update(value)
        else:
            settings[name] = value
    site.config.write_text(json.dumps(settings, indent=1))


def test_an_unknown_key_names_file_line_and_the_nearest_key(own_site: Site) -> None:
    change(own_site, batching={"max_row": 8})
    code, output = end_of(own_site.serve())
    assert code == 2
    assert "headrace.yaml:" in output
    assert "batching.max_row" in output
    assert "max_rows" in output
    assert "Traceback" not in output


def test_a_contradiction_names_both_keys(own_site: Site) -> None:
    change(own_site, admission={"max_rows": 8, "max_inputs_per_request": 4})
    code, output = end_of(own_site.serve())
    assert code == 2
    assert "batching.max_rows" in output
    assert "admission.max_rows" in output


@pytest.mark.parametrize("which", ["grpc", "http"])
def test_a_port_in_use_is_exit_3(own_site: Site, which: str) -> None:
    address = own_site.grpc if which == "grpc" else own_site.http
    host, port = address.split(":")
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        code, output = end_of(own_site.serve())
    assert code == 3
    assert port in output
    assert f"gateway.{which}_address" in output
    own_site.wait_no_process()


def test_an_empty_repository_names_the_next_step(own_site: Site, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    change(own_site, repository=str(tmp_path / "nothing"), models=[])
    code, output = end_of(own_site.serve())
    assert code == 2
    assert "headrace models fetch" in output


def test_a_flipped_byte_in_the_weights_is_exit_4_and_names_the_file(own_site: Site, tmp_path: Path) -> None:
    repository = simulated_repository(tmp_path / "models", "broken")
    (weights,) = repository.rglob("simulated.json")
    weights.chmod(0o644)
    weights.write_text(weights.read_text().replace("2", "3"))
    change(own_site, repository=str(repository), models=["broken"])
    code, output = end_of(own_site.serve())
    assert code == 4
    assert "simulated.json" in output
    own_site.wait_no_process()


def test_a_model_that_fails_leaves_the_others_serving_but_not_ready(own_site: Site, tmp_path: Path) -> None:
    repository = simulated_repository(tmp_path / "models", "good", "broken")
    (weights,) = (repository / "broken").rglob("simulated.json")
    weights.chmod(0o644)
    weights.write_text("{}")
    change(own_site, repository=str(repository), models=[])
    with own_site.serve() as process:
        line = process.wait_line("Headrace is ready")
        assert "good" in line
        status, reason = own_site.get("/readyz")
        assert status == 503
        assert "broken" in reason


def test_a_model_that_can_not_even_be_described_leaves_the_others_serving(own_site: Site, tmp_path: Path) -> None:
    repository = simulated_repository(tmp_path / "models", "good", "typo", "raises")
    (repository / "typo" / "model.yaml").write_text("pipelin: image_classification\n")
    (repository / "raises" / "model.yaml").write_text("pipeline: own:Own\nbackend: simulated\n")
    (repository / "raises" / "own.py").write_text(RAISING_PIPELINE)
    change(own_site, repository=str(repository), models=[])
    with own_site.serve() as process:
        line = process.wait_line("Headrace is ready")
        assert "models good" in line
        status, reason = own_site.get("/readyz")
        assert status == 503
        assert "'raises'" in reason or "'typo'" in reason
        broken = own_site.debug()["broken_models"]
        assert "unknown key pipelin" in broken["typo"]
        assert "its pipeline raised ValueError" in broken["raises"]
        assert "no spec today" not in broken["raises"]  # the user's own text may hold anything: it is in the log
        assert "no spec today" in process.output()
        with (
            Client(own_site.grpc, max_attempts=1) as client,
            pytest.raises(InferenceError, match="unknown key pipelin"),
        ):
            client.classify(b"x", model="typo")


def test_a_runtime_folder_open_to_others_is_refused(own_site: Site) -> None:
    own_site.runtime.mkdir(parents=True)
    own_site.runtime.chmod(0o755)
    code, output = end_of(own_site.module("gateway"))
    assert code == 2
    assert "0755" in output
    shutil.rmtree(own_site.runtime)


def test_a_second_server_in_the_same_folder_is_exit_3(own_site: Site) -> None:
    with own_site.serve() as first:
        first.wait_line("Headrace is ready")
        code, output = end_of(own_site.serve())
        assert code == 3
        assert "already runs" in output
        assert own_site.ready()
