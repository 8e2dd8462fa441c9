import errno
from pathlib import Path

import pytest

from gateway.model_files import ModelFiles
from shared import repository_writer
from shared.errors import Conflict, NotReady, UnknownModel, UnknownVersion
from shared.repository import Repository
from shared.traffic import Traffic, Why, switch
from tests.support.lives_parts import NAME, add


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


async def test_what_the_disk_says_is_traffic_and_the_bytes_of_model_yaml(root: Path) -> None:
    version = add(root, b"old")
    found = await ModelFiles(root).wanted(NAME)
    assert found.traffic == Repository(root).traffic(NAME)
    assert found.traffic.current == version
    assert found.config == (root / NAME / "model.yaml").read_bytes()
    (root / NAME / "traffic.json").unlink()
    assert (await ModelFiles(root).wanted(NAME)).traffic == Traffic(current=version), "the only one is current"


async def test_what_can_not_be_read_is_told_without_our_paths(root: Path) -> None:
    add(root, b"old")
    files = ModelFiles(root)
    with pytest.raises(UnknownModel):
        await files.wanted("nobody")
    for content in ('{"current": "ffffffffffffffff"}', "{"):
        (root / NAME / "traffic.json").write_text(content)
        with pytest.raises(NotReady, match=r"model 'words' can't be loaded: words/traffic\.json") as caught:
            await files.wanted(NAME)
        assert str(root) not in caught.value.text
        assert "; `headrace traffic words --to HASH` writes it anew" in caught.value.text


async def test_a_repository_that_is_gone_is_told_without_our_paths(root: Path) -> None:
    files = ModelFiles(root)  # not there yet
    for ask in (files.wanted(NAME), files.check_there(NAME, ["a"])):
        with pytest.raises(NotReady) as caught:
            await ask
        assert str(root) not in caught.value.text


async def test_who_is_to_answer_must_be_there_or_loaded(root: Path) -> None:
    version, files = add(root, b"old"), ModelFiles(root)
    gone = "f" * 16
    await files.check_there(NAME, [version])
    with pytest.raises(UnknownVersion, match=f"model 'words' has no version '{gone}'"):
        await files.check_there(NAME, [version, gone])
    (root / NAME / "traffic.json").write_text(f'{{"current": "{gone}"}}')
    assert (await files.wanted(NAME, {gone})).traffic.current == gone


async def test_a_change_is_written_only_on_top_of_what_was_read(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    files = ModelFiles(root)
    before = (await files.wanted(NAME)).traffic
    after = await files.write(NAME, before, lambda now: switch(now, new, Why("now", "one")), before)
    assert after == Repository(root).traffic(NAME)
    with pytest.raises(Conflict, match="was changed by somebody else meanwhile; try again"):
        await files.write(NAME, before, lambda now: switch(now, old, Why("now", "two")), before)
    assert Repository(root).traffic(NAME) == after


async def test_a_change_that_is_refused_or_finds_no_room_writes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    files = ModelFiles(root)
    before = (await files.wanted(NAME)).traffic

    def refuses(_now: Traffic) -> Traffic:
        raise Conflict("no")

    with pytest.raises(Conflict, match=r"^no$"):
        await files.write(NAME, before, refuses, before)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(repository_writer, "_write", full)
    with pytest.raises(NotReady, match="model words: can't be written: No space left on device"):
        await files.write(NAME, before, lambda now: switch(now, new, Why("now", "one")), before)
    assert Repository(root).traffic(NAME) == before
