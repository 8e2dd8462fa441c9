"""The README's commands and code, run as they stand, in a copy of the project's folder, against the real server."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headrace import Client
from shared.settings_loader import load
from tests.support.documents import Block, blocks, checkout, environment, own_ports, run
from tests.support.stack import ROOT, Process, Site, serving

BLOCKS = blocks(ROOT / "README.md")
RUN = [block for block in BLOCKS if block.language in {"sh", "python"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a newcomer's checkout looks like after `make run`: the models, the photos, .venv."""
    return checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    argv = [sys.executable, "-m", "headrace", "serve"]
    with own_ports(), Process(argv, folder, environment(folder)) as process:
        process.wait_line("Headrace is ready")
        yield process
        process.popen.terminate()
        process.wait()


@pytest.mark.usefixtures("server")
def test_every_command_and_every_program_works_in_the_order_of_the_page(folder: Path) -> None:
    outputs = []
    for block in RUN:
        done = run(block, folder)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
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
    calls = [line for line in commands if line.startswith("headrace classify .cache") and "--model" in line]
    assert len(calls) == len(models)
    with serving(site), Client(site.grpc) as client:
        answer = client.classify(ROOT / ".cache/photos/imagenet_16_251.jpg", model="traffic-light")
        answers = [run(Block("sh", call), site.folder) for call in calls]
        unnamed = run(Block("sh", calls[0].split(" --model")[0]), site.folder)
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
    for page in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
