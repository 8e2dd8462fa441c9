"""The README's commands and code, run as they stand, in a copy of the project's folder, against the real server."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headrace import Client
from shared.settings_loader import load
from tests.support.stack import ROOT, Process, Site, serving

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
README = (ROOT / "README.md").read_text()
BLOCKS = [(match[1], match[2]) for match in BLOCK.finditer(README)]
RUN = [(language, text) for language, text in BLOCKS if language in {"sh", "python"}]
PORTS = (8000, 8001)  # those that the README names
COMMAND_LIMIT_S = 60


def in_use(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a newcomer's checkout looks like after `make run`: the models, the photos, .venv."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "models", folder / "models")
    (folder / ".cache").symlink_to(ROOT / ".cache")
    shutil.copy(ROOT / "headrace.yaml", folder)
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(folder)}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    busy = [port for port in PORTS if in_use(port)]
    if busy:
        pytest.skip(f"the README's ports {busy} are in use on this machine")
    argv = [sys.executable, "-m", "headrace", "serve"]
    with Process(argv, folder, environment(folder)) as process:
        process.wait_line("Headrace is ready")
        yield process
        process.popen.terminate()
        process.wait()


def run(language: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    activate = ". .venv/bin/activate\n"  # this test's interpreter stands first on PATH instead
    argv = ["bash", "-euo", "pipefail", "-c", text.replace(activate, "")]
    if language == "python":
        argv = [sys.executable, "-c", text]
    return subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment(folder)},
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )


@pytest.mark.usefixtures("server")
def test_every_command_and_every_program_works_in_the_order_of_the_page(folder: Path) -> None:
    outputs = []
    for language, text in RUN:
        done = run(language, text, folder)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        outputs.append(done.stdout)
    told = "\n".join(outputs).lower()
    assert told.count("dalmatian") >= 4, told  # command line, client, grpcurl, stubs
    assert "headrace.v1.inference" in told  # grpcurl list
    assert "run;dur=" in told  # the stubs' trailer
    assert "traffic-light" in told


@pytest.mark.usefixtures("server")
def test_the_readme_says_what_it_runs() -> None:
    assert {language for language, _ in BLOCKS} <= {"sh", "python", "console", "yaml", "text"}
    assert len(RUN) >= 8


def test_the_own_classifier_of_the_readme_serves(folder: Path, tmp_path: Path) -> None:
    if not (folder / "models" / "traffic-light" / "traffic.json").exists():
        pytest.skip("the README's commands did not run")
    models = ["efficientnet-lite0", "traffic-light"]
    site = Site(tmp_path / "site", folder / "models", models=models)
    (site.folder / ".cache").symlink_to(ROOT / ".cache")
    commands = [
        line.removeprefix("$ ") for language, text in BLOCKS if language == "console" for line in text.split("\n")
    ]
    calls = [line for line in commands if line.startswith("headrace classify") and "--model" in line]
    assert len(calls) == len(models)
    with serving(site), Client(site.grpc) as client:
        answer = client.classify(ROOT / ".cache/photos/imagenet_16_251.jpg", model="traffic-light")
        answers = [run("sh", call, site.folder) for call in calls]
        unnamed = run("sh", calls[0].split(" --model")[0], site.folder)
    assert {label.name for label in answer.labels} == {"red", "amber", "green"}
    for call, done in zip(calls, answers, strict=True):
        assert done.returncode == 0, f"{call}\n{done.stderr}"
        assert call.split()[-1] in done.stdout
    assert all(word in answers[0].stdout for word in ("red", "amber", "green"))
    assert "dalmatian" in answers[1].stdout.lower()
    assert unnamed.returncode == 1
    assert "several take image" in unnamed.stderr


def test_the_settings_of_the_readme_are_valid(tmp_path: Path) -> None:
    for language, text in BLOCKS:
        if language == "yaml":
            config = tmp_path / "headrace.yaml"
            config.write_text(text)
            assert load(config, {}).settings.gateway.grpc_address == yaml.safe_load(text)["gateway"]["grpc_address"]


def test_every_link_leads_somewhere() -> None:
    for name in ("README.md", "ARCHITECTURE.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
            assert target.startswith("http") or (ROOT / target).exists(), f"{name}: {target}"
