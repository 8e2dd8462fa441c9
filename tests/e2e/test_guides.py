"""The guides' commands and programs, run as they stand, in an empty folder, against the real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.new_templates import TEMPLATES
from shared.repository import Repository
from tests.support.documents import Block, blocks, checkout, environment, own_ports, run
from tests.support.stack import ROOT, Process

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
SERVE = "$ headrace serve"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, jpeg: bytes) -> Path:
    """An empty one with a short name, since the server's sockets lie in it, and the reader's photo."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "photo.jpg").write_bytes(jpeg)
    return folder


@pytest.fixture
def ports() -> Iterator[None]:
    """Those that the pages name."""
    with own_ports():
        yield


def served(folder: Path) -> Process:
    """What the reader has typed in another terminal."""
    process = Process(["headrace", "serve"], folder, environment(folder))
    process.wait_line("Headrace is ready")
    return process


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ports")
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_block_works_in_the_order_of_the_page(guide: Path, folder: Path) -> None:
    """A page says when it starts the server; else it is read beside one that serves the default models."""
    page = blocks(guide)
    server = None if any(SERVE in block.text for block in page) else served(checkout(folder))
    try:
        for block in page:
            if SERVE in block.text:
                server = served(folder)
            if block.language not in {"sh", "python"}:
                continue
            done = run(block, folder)
            output = server.output() if server is not None else ""
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}\n{output[-5000:]}"
            assert "Traceback" not in done.stderr
    finally:
        if server is not None:
            server.popen.terminate()
            code = server.wait()
            server.close()
    assert server is not None
    assert code == 0
    if guide.stem == "detection":
        drawn = sorted(file.name for file in (folder / "found").iterdir())
        assert drawn == ["photo-boxes-2.png", "photo-boxes.png"], "one for each photo given"


def test_there_are_guides() -> None:
    assert "bring-your-own" in {guide.stem for guide in GUIDES}
    languages = {block.language for guide in GUIDES for block in blocks(guide)}
    assert languages <= {"sh", "python", "console", "yaml"}


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ports")
def test_new_models_of_every_kind_serve_at_once(folder: Path) -> None:
    calls = {kind: template.call.replace("NAME", f"my-{kind}") for kind, template in TEMPLATES.items()}
    assert set(calls) == {"image", "text", "tensor"}
    for kind, call in calls.items():
        made = run(Block("sh", f"headrace new my-{kind} --from {kind}"), folder)
        assert made.returncode == 0, made.stderr
        assert call in made.stdout
    server = served(folder)
    try:
        done = {kind: run(Block("sh", call), folder) for kind, call in calls.items()}
    finally:
        server.popen.terminate()
        server.wait()
        server.close()
    for kind, one in done.items():
        assert one.returncode == 0, one.stdout + one.stderr
        assert Repository(folder / "models").current(f"my-{kind}")
        assert ("third" in one.stdout) if kind != "tensor" else ('"y"' in one.stdout), one.stdout
