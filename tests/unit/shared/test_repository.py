from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shared.errors import ExitCode, UnknownModel, UnknownVersion
from shared.repository import Meta, ModelVersion, Repository, RepositoryError, is_name, no_name
from shared.repository_files import faults
from shared.repository_writer import add_version
from shared.settings import BatchingSettings

CONFIG = "pipeline: tensor\nbackend: simulated\n"

Add = Callable[..., ModelVersion]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "model.yaml").write_text(CONFIG)
    return root


@pytest.fixture
def add(root: Path, tmp_path: Path) -> Add:
    def add(content: bytes = b"weights", name: str = "m", *, current: bool = False, **files: bytes) -> ModelVersion:
        paths = {}
        for file, data in {"weights.bin": content, **files}.items():
            paths[file] = tmp_path / f"source-{file}"
            paths[file].write_bytes(data)
        return add_version(root, name, paths, Meta(source="test"), make_current=current)

    return add


BAD_NAMES = [
    "../x", "..", ".", "", " ", "a/b", "/etc/passwd", "/", "//host/x", "..\\x", "a\\b", "C:\\x", "C:x",
    "%2e%2e", "%2e%2e%2fx", "..%2fx", "a%00b", "a\x00b", "\x00", "m\n", "\nm", "m ", " m", "m\t", "m\r\n",
    "a..b", "m/../m", "./m", "m/.", "m/", "~", "~root", "$HOME", "`id`", "$(id)", "m;ls", "m|x", "m&x", "*", "?", "[m]",
    "-m", "--config", ".hidden", "_m", "ｍ", "м", "m\u200b", "m\u202e", "ı", "ｍｏｄｅｌ", "．．", "∕etc", "‥",
    "m\u0301", "file:///etc/passwd", "http://example.org/x", "s3://b/k", "\\\\host\\share", "m?x=1", "m#x", "m:x",
    "a" * 129, "a" * 10_000, "../" * 50 + "etc/passwd", "con\x1b[31m", "m'", 'm"', "<m>", "{m}", "m,m", "m=m", "m@m",
    "m+m", "m!m", "\ud800",
]  # fmt: skip


def test_the_table_of_bad_names_is_long_enough() -> None:
    assert len(set(BAD_NAMES)) >= 40


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:30])
def test_no_bad_name_opens_anything(root: Path, add: Add, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = add()
    repository = Repository(root)
    assert not is_name(name)

    def no_disk(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a caller's name reached the disk")

    for method in ("open", "exists", "is_file", "is_dir", "iterdir", "resolve", "stat"):
        monkeypatch.setattr(Path, method, no_disk)
    for call in (repository.versions, repository.current, repository.open):
        with pytest.raises(UnknownModel) as caught:
            call(name)
        assert str(root) not in caught.value.text
        assert len(caught.value.text) < 1000
        caught.value.text.encode()  # half a surrogate pair would not be UTF-8
        assert caught.value.text.isprintable()
    if name:  # an empty version means the current one
        with pytest.raises(UnknownVersion) as caught_version:
            repository.open("m", name)
        caught_version.value.text.encode()
        assert caught_version.value.text.isprintable()
    assert version.version


@pytest.mark.parametrize("name", ["m", "M1", "efficientnet-lite0", "a.b_c-d", "0", "a" * 128])
def test_good_names(name: str) -> None:
    assert is_name(name)


def test_only_folders_with_a_model_yaml_inside_the_root_are_models(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model.yaml").write_text(CONFIG)
    (root / "link").symlink_to(outside)
    (root / "circle").symlink_to(root / "circle")
    (root / "empty").mkdir()
    (root / ".hidden").mkdir()
    (root / ".hidden" / "model.yaml").write_text(CONFIG)
    (root / "file").write_text("x")
    assert Repository(root).names() == ["m"]


def test_a_version_that_links_outside_is_no_version(root: Path, add: Add, tmp_path: Path) -> None:
    version = add()
    outside = tmp_path / "outside"
    version.files.rename(outside)
    version.files.symlink_to(outside)
    assert Repository(root).versions("m") == []


def test_unfinished_and_foreign_folders_are_no_versions(root: Path, add: Add) -> None:
    version = add()
    home = version.files.parent
    (home / ".new-0123456789abcdef").mkdir()
    (home / "0123456789abcdef").mkdir()
    (home / "notes").mkdir()
    assert Repository(root).versions("m") == [version.version]


def test_a_missing_repository_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(
        RepositoryError, match=r"repository: there is no such folder .*`repository` in headrace.yaml"
    ) as caught:
        Repository(tmp_path / "none")
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS


def test_current_is_the_only_one_or_what_traffic_says(root: Path, add: Add) -> None:
    with pytest.raises(UnknownVersion, match="no version yet"):
        Repository(root).current("m")
    first = add(b"1")
    assert Repository(root).current("m") == first.version
    second = add(b"2")
    assert Repository(root).current("m") == first.version, "a later one is not current by itself"
    (root / "m" / "traffic.json").unlink()
    with pytest.raises(RepositoryError, match=r"m/traffic.json: is missing, and m has 2 versions"):
        Repository(root).current("m")
    add(b"2", current=True)
    assert Repository(root).open("m").version == second.version
    assert Repository(root).open("m", first.version).version == first.version


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"current": 5}', b'{"current": "0000000000000000"}', b'{"current": "../../x"}']
)
def test_a_bad_traffic_file_is_named(root: Path, add: Add, content: bytes) -> None:
    add()
    (root / "m" / "traffic.json").write_bytes(content)
    with pytest.raises(RepositoryError, match=r"^m/traffic.json: "):
        Repository(root).open("m")


def test_refresh_sees_new_versions(root: Path, add: Add) -> None:
    repository = Repository(root)
    version = add()
    assert repository.versions("m") == []
    repository.refresh()
    assert repository.versions("m") == [version.version]


def test_a_whole_version_passes_verification(add: Add) -> None:
    Repository.verify(add(labels=b"a\nb\n"))


def test_one_flipped_byte_is_found_and_the_file_named(root: Path, add: Add) -> None:
    version = add(b"x" * 100_000)
    path = version.files / "weights.bin"
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(77_777)
        file.write(b"y")
    with pytest.raises(RepositoryError) as caught:
        Repository.verify(Repository(root).open("m"))
    assert caught.value.text.startswith(f"m/versions/{version.version}/weights.bin: has changed")
    assert str(root) not in caught.value.text
    assert caught.value.exit_code == ExitCode.MODEL_LOAD


def test_missing_foreign_and_linked_files_are_found(add: Add, tmp_path: Path) -> None:
    version = add(extra=b"e")
    (version.files / "foreign").write_text("x")
    with pytest.raises(RepositoryError, match="foreign: does not belong"):
        Repository.verify(version)
    (version.files / "foreign").unlink()
    (version.files / "extra").unlink()
    with pytest.raises(RepositoryError, match="extra: is missing"):
        Repository.verify(version)
    (tmp_path / "same").write_bytes(b"e")
    (version.files / "extra").symlink_to(tmp_path / "same")
    with pytest.raises(RepositoryError, match="extra: is a link"):
        Repository.verify(version)
    (version.files / "extra").unlink()
    (version.files / "extra").hardlink_to(tmp_path / "same")
    with pytest.raises(RepositoryError, match="extra: is a link"):
        Repository.verify(version)


@pytest.mark.parametrize("change", ["digest", "files", "folder"])
def test_a_forged_meta_file_is_refused(root: Path, add: Add, change: str) -> None:
    version = add()
    path = version.files / "meta.json"
    meta = msgspec.json.decode(path.read_bytes(), type=Meta)
    if change == "digest":
        meta = msgspec.structs.replace(meta, digest="0" * 64)
    elif change == "files":
        meta = msgspec.structs.replace(meta, files={"weights.bin": "0" * 64})
    path.write_bytes(msgspec.json.encode(meta))
    if change == "folder":
        version.files.rename(version.files.with_name("0" * 16))
    (root / "m" / "traffic.json").unlink()
    with pytest.raises(RepositoryError, match="do not agree"):
        Repository(root).open("m")


def test_a_version_is_found_by_the_beginning_of_its_hash(root: Path, add: Add) -> None:
    version = add().version
    repository = Repository(root)
    assert {repository.find("m", version[:digits]) for digits in range(4, 17)} == {version}
    for prefix in ("", version[:3]):
        with pytest.raises(UnknownVersion, match="4 digits of its hash or more"):
            repository.find("m", prefix)
    for prefix in ("zzzz", version + "0", "../..", version[:4].upper() + "x"):
        with pytest.raises(UnknownVersion, match="has no such version"):
            repository.find("m", prefix)
    twin = version[:15] + ("0" if version[15] != "0" else "1")
    (root / "m" / "versions" / twin).mkdir()
    (root / "m" / "versions" / twin / "meta.json").write_text("{}")
    repository.refresh()
    with pytest.raises(UnknownVersion, match="2 versions start with it"):
        repository.find("m", version[:15])
    assert repository.find("m", version) == version


def test_every_fault_is_told_not_only_the_first(add: Add) -> None:
    version = add(labels=b"a\nb\n", third=b"3")
    for name in ("weights.bin", "labels"):
        (version.files / name).chmod(0o644)
        (version.files / name).write_bytes(b"other")
    (version.files / "third").unlink()
    (version.files / "foreign").write_bytes(b"x")
    read: list[int] = []
    found = list(faults(version.files, version.meta.files, read.append))
    words = ["foreign: does not belong", "labels: has changed", "third: is missing", "weights.bin: has changed"]
    assert [word for word, fault in zip(words, found, strict=True) if word in fault] == words
    assert sum(read) == 2 * len(b"other")


def test_labels_come_from_the_version_then_from_the_model(root: Path, add: Add) -> None:
    (root / "m" / "model.yaml").write_text(CONFIG + "labels: labels.txt\n")
    plain = add(b"1")
    with pytest.raises(RepositoryError, match=r"labels file labels.txt is neither"):
        plain.labels()
    (root / "m" / "labels.txt").write_text("of\nmodel\n")
    assert plain.labels() == ("of", "model")
    own = add(b"2", **{"labels.txt": "née\n".encode()})
    assert own.labels() == ("née",)
    (root / "m" / "labels.txt").write_bytes(b"\xff")
    with pytest.raises(RepositoryError, match="not UTF-8"):
        plain.labels()


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (b"", ()),
        (b"a\n\nb", ("a", "", "b")),
        (b"a\r\nb\r\n", ("a", "b")),
        ("a\u2028b\nc\n".encode(), ("a\u2028b", "c")),
    ],
)
def test_a_label_is_one_line_and_nothing_shifts(root: Path, add: Add, content: bytes, labels: tuple[str, ...]) -> None:
    (root / "m" / "model.yaml").write_text(CONFIG + "labels: l.txt\n")
    assert add(**{"l.txt": content}).labels() == labels


def test_a_folder_that_cannot_be_read_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(RepositoryError, match="can't be read: Permission denied"):
        Repository(root)


def test_no_labels_named_is_no_labels(add: Add) -> None:
    assert add().labels() == ()


@pytest.mark.parametrize(
    ("lines", "rows", "wait_ms", "sizes"),
    [
        ("", 32, 5.0, (1, 2, 4, 8, 16, 32)),
        ("batching: {max_rows: 4}", 4, 5.0, (1, 2, 4)),
        ("batching: {sizes: [1, 8]}", 8, 5.0, (1, 8)),
        ("batching: {max_wait_ms: 0}", 32, 0.0, (1, 2, 4, 8, 16, 32)),
        ("batching: {max_rows: 8, sizes: [8]}", 8, 5.0, (8,)),
    ],
)
def test_batching_overrides_the_defaults_in_part(
    root: Path, add: Add, lines: str, rows: int, wait_ms: float, sizes: tuple[int, ...]
) -> None:
    (root / "m" / "model.yaml").write_text(CONFIG + lines)
    batching = add().batching(BatchingSettings())
    assert (batching.max_rows, batching.max_wait_ms, batching.sizes) == (rows, wait_ms, sizes)


def test_a_models_weight_overrides_the_default(root: Path, add: Add) -> None:
    assert add().batching(BatchingSettings(weight=2.0)).weight == 2.0
    (root / "m" / "model.yaml").write_text(CONFIG + "batching: {weight: 0.5}")
    assert add().batching(BatchingSettings(weight=2.0)).weight == 0.5


def test_a_contradictory_batching_names_both_keys(root: Path, add: Add) -> None:
    (root / "m" / "model.yaml").write_text(CONFIG + "batching: {max_rows: 8, sizes: [1, 4]}")
    with pytest.raises(RepositoryError, match=r"m/model.yaml: batching.sizes .* batching.max_rows") as caught:
        add().batching(BatchingSettings())
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS


@pytest.mark.parametrize("name", [*BAD_NAMES[:12], "other", "absent"])
def test_one_model_can_be_looked_at_alone(root: Path, add: Add, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = add()
    (root / "other").mkdir()
    monkeypatch.setattr(Path, "iterdir", None)  # it looks at nothing else
    monkeypatch.setattr("shared.repository._versions_in", lambda _folder: (version.version,))
    alone = Repository(root, only="m")
    assert (alone.names(), alone.current("m")) == (["m"], version.version)
    with pytest.raises(UnknownModel, match=r"is unknown$"):
        Repository(root, only=name).versions(name)


def test_a_letter_that_is_no_ascii_is_shown_as_people_write_it(root: Path, add: Add) -> None:
    add()
    with pytest.raises(UnknownModel, match=r"^model 'café-日本' is unknown"):
        Repository(root).open("café-日本")
    assert no_name("a\u202eb\x1b").startswith(r"'a\u202eb\x1b' can't be")
