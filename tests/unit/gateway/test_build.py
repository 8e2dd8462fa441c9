from pathlib import Path

import pytest

from gateway.build import served_model, served_models
from shared.errors import StartupError, UnknownModel, UnknownVersion
from shared.model_config import config_bytes, revision_of
from shared.repository import Meta, Repository
from shared.repository_writer import add_version
from shared.settings import Settings
from tests.support.lives_parts import MODEL_YAML, NAME, add
from tests.support.text_parts import write_models


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def settings(root: Path, *models: str) -> Settings:
    return Settings(repository=root, models=models)


def test_each_model_is_served_at_its_current_version_with_the_model_yaml_that_was_read(root: Path) -> None:
    old, _ = add(root, b"old"), add(root, b"new")
    add(root, b"other", "other", more="load: on_demand\ncache: false\nbatching: {max_rows: 3}\n")
    found = served_models(settings(root))
    words, other = sorted(found.served, key=lambda model: model.name == "other")
    assert found.broken == []
    assert (words.name, words.version, words.pinned, words.cached) == (NAME, old, True, True)
    assert (other.pinned, other.cached, other.max_rows) == (False, False, 3)
    assert words.revision == revision_of(config_bytes(root / NAME))
    assert words.number != other.number
    assert [model.name for model in served_models(settings(root, "other")).served] == ["other"]


def test_a_model_that_can_not_be_described_is_shown_with_the_reason_and_the_others_are_served(root: Path) -> None:
    add(root, b"old")
    add(root, b"bad", "bad")
    (root / "bad" / "model.yaml").write_text("pipeline: tensor\nbackend: simulated\ncolour: red\n")
    found = served_models(settings(root))
    assert [model.name for model in found.served] == [NAME]
    (state,) = found.broken
    assert (state.name, state.phase) == ("bad", "failed")
    assert "colour" in state.reason
    with pytest.raises(StartupError, match="colour"):
        served_models(settings(root, "bad"))


def test_a_repository_without_versions_names_the_next_step(root: Path) -> None:
    with pytest.raises(StartupError, match="headrace models fetch"):
        served_models(settings(root))


def test_a_version_is_built_from_the_bytes_that_were_read_whatever_the_disk_says_now(root: Path) -> None:
    add(root, b"old")
    repository = Repository(root)
    (root / NAME / "model.yaml").write_text("pipeline: [")
    config = (MODEL_YAML + "batching: {max_rows: 7}\n").encode()
    model = served_model(repository, settings(root), 5, NAME, config=config)
    assert (model.number, model.max_rows, model.config, model.revision) == (5, 7, config, revision_of(config))
    with pytest.raises(StartupError, match="words/model"):
        served_model(repository, settings(root), 5, NAME)
    with pytest.raises(UnknownVersion):
        served_model(repository, settings(root), 5, NAME, "f" * 16, config)
    with pytest.raises(UnknownModel):
        served_model(repository, settings(root), 5, "nobody")


def test_what_is_prepared_alike_has_one_digest_across_versions_and_another_with_other_settings(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    repository, chosen = Repository(root), settings(root)
    digests = [served_model(repository, chosen, 1, NAME, version).preprocessing for version in (old, new)]
    changed = MODEL_YAML.replace("shape: [4]", "shape: [8]").encode()
    digests.append(served_model(repository, chosen, 1, NAME, old, changed).preprocessing)
    batching = (MODEL_YAML + "batching: {max_rows: 7}\n").encode()
    digests.append(served_model(repository, chosen, 1, NAME, old, batching).preprocessing)
    assert digests[0] == digests[1] == digests[3] != digests[2]


def test_another_tokeniser_prepares_otherwise(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models")
    repository, chosen = Repository(root), settings(root)
    digests = [served_model(repository, chosen, 1, "embed").preprocessing]
    (weights,) = root.glob("embed/versions/*/model.safetensors")
    for changed, name in ((b"{}", "tokenizer.json"), (b"other", "notes.txt")):
        (tmp_path / name).write_bytes(changed)
        files = {"model.safetensors": weights, "tokenizer.json": weights.with_name("tokenizer.json")}
        version = add_version(root, "embed", {**files, name: tmp_path / name}, Meta(source="test"))
        repository.refresh()
        digests.append(served_model(repository, chosen, 1, "embed", version.version).preprocessing)
    assert digests[0] == digests[2] != digests[1]
