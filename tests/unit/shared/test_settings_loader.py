import re
from pathlib import Path

import pytest

from shared.errors import ExitCode, StartupError
from shared.mistakes import leaves
from shared.settings import Settings
from shared.settings_loader import Loaded, load, variable_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headrace.yaml"


def _refused(file: Path, text: str, environ: dict[str, str] | None = None) -> str:
    file.write_text(text)
    with pytest.raises(StartupError) as caught:
        load(file, environ or {})
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS
    assert "\n" not in caught.value.text
    return caught.value.text


def _loaded(file: Path, text: str, environ: dict[str, str] | None = None) -> Loaded:
    file.write_text(text)
    return load(file, environ or {})


MISTAKES = [
    ("gateway:\n  grpc_adress: x\n", 2, "unknown key gateway.grpc_adress (did you mean gateway.grpc_address?)"),
    ("grpc_address: x\n", 1, "unknown key grpc_address (did you mean gateway.grpc_address?)"),
    ("log:\n  level: info\nbatchin:\n  max_rows: 1\n", 3, "unknown key batchin (did you mean batching?)"),
    ("pool:\n  memory: 5\n", 2, "unknown key pool.memory (did you mean pool.memory_bytes?)"),
    ("zzz: 1\n", 1, "unknown key zzz"),
    ("log:\n  level: inf\n", 2, "(did you mean info?)"),
    ("gateway:\n  drain_ms: soon\n", 2, "gateway.drain_ms is 'soon': must be a whole number"),
    ("gateway:\n  drain_ms: 1.5\n", 2, "gateway.drain_ms is 1.5: must be a whole number"),
    ("gateway:\n\n  drain_ms: -1\n", 3, "gateway.drain_ms is -1: must be greater than 0"),
    ("gateway:\n  drain_ms: true\n", 2, "gateway.drain_ms is true: must not be true or false"),
    ("gateway:\n  drain_ms: ~\n", 2, "gateway.drain_ms is None: must be a whole number"),
    ("gateway:\n  reflection: 7\n", 2, "gateway.reflection is 7: must be true or false"),
    ("gateway:\n  grpc_address: 8001\n", 2, "gateway.grpc_address is 8001: must be text"),
    ("gateway:\n  grpc_address: [a]\n", 2, "gateway.grpc_address is ['a']: must be text"),
    ("repository: 5\n", 1, "repository is 5"),
    ("gateway:\n  grpc_address: 127.0.0.1:99999\n", 2, "gateway.grpc_address is '127.0.0.1:99999': must be host:port"),
    ("gateway:\n  http_address: localhost\n", 2, "gateway.http_address is 'localhost': must be host:port"),
    ("gateway:\n  grpc_address: ':'\n", 2, "gateway.grpc_address is ':': must be host:port"),
    ("gateway:\n  grpc_address: host:{a}\n", 2, "gateway.grpc_address is 'host:{a}': must be host:port with a port"),
    ("gateway:\n  http_address: '::1:1'\n", 2, "gateway.http_address is '::1:1': must have an IPv6 address in brac"),
    ("log: {}\nruntime_dir: ''\n", 2, "runtime_dir is '': must not be empty"),
    ("repository: '  '\n", 1, "repository is '  ': must not be empty"),
    ("models: resnet\n", 1, "models is 'resnet': must be a list"),
    ("models: [a, 1]\n", 1, "models.1 is 1: must be text"),
    ("pool: 5\n", 1, "pool is 5: must be a group of keys"),
    ("batching:\n  sizes:\n    - 1\n    - x\n", 4, "batching.sizes.1 is 'x': must be a whole number"),
    ("batching:\n  max_rows: 0\n", 2, "batching.max_rows is 0: must be greater than or equal to 1"),
    ("batching:\n  max_rows: .inf\n", 2, "batching.max_rows is inf: must be a finite number"),
    ("batching:\n  sizes: [1, 8000]\n", 2, "batching.sizes.1 is 8000: must be less than or equal to 4096"),
    ("batching:\n  sizes: [1, 0]\n", 2, "batching.sizes.1 is 0: must be greater than or equal to 1"),
    ("batching:\n  sizes: [4, 1]\n", 2, "batching.sizes [4, 1] must be batch sizes that rise, at least one"),
    ("batching:\n  sizes: []\n", 2, "batching.sizes [] must be batch sizes that rise, at least one"),
    ("batching:\n  max_rows: 8\n  sizes: [8, 4]\n", 3, "batching.sizes [8, 4] must be batch sizes that rise"),
    ("batching:\n  weight: 0\n", 2, "batching.weight is 0: must be greater than or equal to 0.001"),
    ("batching:\n  weight: 1001\n", 2, "batching.weight is 1001: must be less than or equal to 1000"),
    ("batching:\n  weight: .nan\n", 2, "batching.weight is nan: must be a finite number"),
    ("batching:\n  weight: .inf\n", 2, "batching.weight is inf: must be a finite number"),
    ("batching:\n  max_wait_ms: .nan\n", 2, "batching.max_wait_ms is nan: must be a finite number"),
    ("worker:\n  device: tpu\n", 2, "worker.device is 'tpu'"),
    ("pool:\n  processes: 0\n", 2, "pool.processes is 0: must be greater than or equal to 1"),
    ("pool:\n  processes: 1\n  processes: 2\n", 3, "pool.processes is given twice (first on line 2)"),
    ("pool:\n\tprocesses: 1\n", 2, "holds a tab"),
    ("repository: !!python/object/apply:os.system ['touch canary']\n", 1, "is not allowed"),
    ("a: &a [x, x]\nb: &b [*a, *a]\n", 1, "unknown key a"),
    ("[1, 2]\n", 1, "must be a mapping"),
]


@pytest.mark.parametrize(("text", "line", "words"), MISTAKES)
def test_a_mistake_names_file_line_key_and_nearest(file: Path, text: str, line: int, words: str) -> None:
    told = _refused(file, text)
    assert told.startswith(f"headrace.yaml:{line}: ")
    assert words in told
    assert "default" not in told, "nobody wrote the default"


def test_nothing_follows_from_a_value_that_is_refused(file: Path) -> None:
    told = _refused(file, "batching:\n  max_rows: 0\n")
    assert told == "headrace.yaml:2: batching.max_rows is 0: must be greater than or equal to 1"


CONTRADICTIONS = [
    ("gateway: {drain_ms: 9000}", "gateway.drain_ms", "supervisor.stop_ms"),
    ("gateway: {default_deadline_ms: 700000}", "gateway.default_deadline_ms", "gateway.max_deadline_ms"),
    ("gateway: {max_message_bytes: 999999999}", "gateway.max_message_bytes", "admission.max_bytes"),
    (
        "{gateway: {max_message_bytes: 2000000}, arena: {budget_bytes: 1048576}}",
        "gateway.max_message_bytes",
        "arena.budget_bytes",
    ),
    ("admission: {max_rows: 8}", "batching.max_rows", "admission.max_rows"),
    ("admission: {max_rows: 100}", "admission.max_inputs_per_request", "admission.max_rows"),
    ("batching: {max_rows: 8, sizes: [1, 4]}", "batching.sizes", "batching.max_rows"),
    ("supervisor: {backoff_first_ms: 20000}", "supervisor.backoff_first_ms", "supervisor.backoff_max_ms"),
    ("gateway: {http_address: '127.0.0.1:8001'}", "gateway.grpc_address", "gateway.http_address"),
]


@pytest.mark.parametrize(("text", "one", "other"), CONTRADICTIONS)
def test_a_contradiction_names_both_keys_and_where_each_came_from(file: Path, text: str, one: str, other: str) -> None:
    told = _refused(file, text)
    assert told.startswith("headrace.yaml:1: ")
    assert one in told
    assert other in told
    assert f"{one} from " in told
    assert f"{other} from " in told


def test_a_contradiction_between_a_file_and_a_variable_names_the_variable(file: Path) -> None:
    told = _refused(file, "gateway:\n  drain_ms: 9000\n", {"HEADRACE_SUPERVISOR__STOP_MS": "8000"})
    assert "gateway.drain_ms from headrace.yaml:2" in told
    assert "supervisor.stop_ms from HEADRACE_SUPERVISOR__STOP_MS" in told


def test_a_stop_is_long_enough_for_requests_in_flight_and_for_what_follows_them(file: Path) -> None:
    told = _refused(file, "gateway:\n  drain_ms: 4000\n")
    assert "gateway.drain_ms (4000) must not be above supervisor.stop_ms less 3500 for the rest of a stop" in told
    file.write_text("gateway: {drain_ms: 4000}\nsupervisor: {stop_ms: 7500}\n")
    assert load(file, {}).settings.supervisor.stop_ms == 7500


def test_a_variable_does_not_hide_a_group_that_is_no_group(file: Path) -> None:
    told = _refused(file, "pool: 5\n", {"HEADRACE_POOL__PROCESSES": "2"})
    assert told == "headrace.yaml:1: pool is 5: must be a group of keys"


def test_several_mistakes_the_first_is_told_and_the_others_counted(file: Path) -> None:
    told = _refused(file, "gateway:\n  drain_ms: -1\n  reflection: 7\npool:\n  processes: x\n")
    assert told.startswith("headrace.yaml:2: gateway.drain_ms")
    assert told.endswith("(and 2 more mistakes)")


def test_the_canary_of_a_python_tag_is_not_executed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    _refused(file, "repository: !!python/object/apply:os.system ['touch canary']\n")
    assert not (file.parent / "canary").exists()


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("HEADRACE_POOL__PROCESES", "unknown environment variable (did you mean HEADRACE_POOL__PROCESSES?)"),
        ("HEADRACE_POOL_PROCESSES", "unknown environment variable (did you mean HEADRACE_POOL__PROCESSES?)"),
        ("headrace_pool__processes", "unknown environment variable (did you mean HEADRACE_POOL__PROCESSES?)"),
        ("HEADRACE_X", "unknown environment variable"),
        ("HEADRACE_POOL", "unknown environment variable"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest(file: Path, variable: str, words: str) -> None:
    assert words in _refused(file, "", {variable: "1"})


def test_a_bad_value_in_a_variable_names_the_variable(file: Path) -> None:
    told = _refused(file, "pool:\n  processes: 2\n", {"HEADRACE_POOL__PROCESSES": "many"})
    assert told == "HEADRACE_POOL__PROCESSES: pool.processes is 'many': must be a whole number"
    told = _refused(file, "", {"HEADRACE_BATCHING__WEIGHT": "nan"})
    assert told == "HEADRACE_BATCHING__WEIGHT: batching.weight is 'nan': must be a finite number"


@pytest.mark.parametrize(
    ("dotted", "value", "rule"),
    [
        ("gateway.grpc_address", "1.2.3.4:", "must be host:port with a port from 0 to 65535"),
        ("gateway.http_address", "", "must be host:port"),
        ("repository", "", "must not be empty"),
    ],
)
def test_what_can_not_be_used_is_found_in_variables_too(file: Path, dotted: str, value: str, rule: str) -> None:
    told = _refused(file, "", {variable_of(dotted): value})
    assert told == f"{variable_of(dotted)}: {dotted} is {value!r}: {rule}"


def test_an_ipv6_address_is_one(file: Path) -> None:
    assert _loaded(file, "gateway: {grpc_address: '[::1]:8001'}\n").settings.gateway.grpc_address == "[::1]:8001"


def test_variables_win_over_the_file_and_the_file_over_defaults(file: Path) -> None:
    loaded = _loaded(
        file,
        "log:\n  level: debug\npool:\n  processes: 2\n",
        {
            "HEADRACE_POOL__PROCESSES": "3",
            "HEADRACE_MODELS": "a,b",
            "HEADRACE_GATEWAY__REFLECTION": "false",
            "HEADRACE_BATCHING__MAX_WAIT_MS": "2.5",
            "HOME": "/somewhere",
        },
    )
    settings = loaded.settings
    assert (settings.pool.processes, settings.log.level, settings.models) == (3, "debug", ("a", "b"))
    assert not settings.gateway.reflection
    assert settings.batching.max_wait_ms == 2.5
    assert loaded.origins["pool.processes"] == "HEADRACE_POOL__PROCESSES"
    assert loaded.origins["log.level"] == "headrace.yaml:2"
    assert loaded.origins["log.format"] == "default"
    assert loaded.values()["pool.processes"] == 3


@pytest.mark.parametrize("text", ["[1, 2, 4]", "1,2,4", "1, 2, 4"])
def test_a_list_in_a_variable(file: Path, text: str) -> None:
    loaded = _loaded(file, "", {"HEADRACE_BATCHING__SIZES": text})
    assert loaded.settings.batching.sizes == (1, 2, 4)
    assert loaded.settings.batching.max_rows == 4
    assert loaded.origins["batching.max_rows"] == "derived"


@pytest.mark.parametrize("text", ["", "null"])
def test_a_variable_can_say_none_where_the_default_is_none(file: Path, text: str) -> None:
    assert _loaded(file, "pool:\n  processes: 2\n", {"HEADRACE_POOL__PROCESSES": text}).settings.pool.processes is None


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (33, (1, 2, 4, 8, 16, 32, 33))]
)
def test_sizes_follow_from_max_rows(file: Path, rows: int, sizes: tuple[int, ...]) -> None:
    loaded = _loaded(file, f"batching:\n  max_rows: {rows}\n")
    assert loaded.settings.batching.sizes == sizes


def test_every_setting_has_an_origin_and_a_variable_that_works(file: Path) -> None:
    loaded = _loaded(file, "")
    assert set(loaded.origins) == set(leaves(Settings))
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.settings == Settings()
    for dotted in loaded.origins:
        assert variable_of(dotted).startswith("HEADRACE_")


def test_relative_paths_in_a_file_are_relative_to_the_file(file: Path) -> None:
    loaded = _loaded(file, "repository: here\nruntime_dir: run\n")
    assert loaded.settings.repository == file.parent / "here"
    assert loaded.settings.runtime_dir == file.parent / "run"
    assert _loaded(file, "repository: /abs\n").settings.repository == Path("/abs")
    assert _loaded(file, "").settings.repository == Path("models")


def test_empty_groups_are_no_groups(file: Path) -> None:
    assert _loaded(file, "pool:\nlog:\n").settings == Settings()


def test_without_a_file_the_working_folder_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(None, {}).settings == Settings()
    (tmp_path / "headrace.yaml").write_text("log: {level: error}\n")
    assert load(None, {}).origins["log.level"] == "headrace.yaml:1"


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="there is no such settings file"):
        load(tmp_path / "none.yaml", {})


def test_settings_take_nothing_from_the_environment_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_POOL__PROCESSES", "7")
    assert Settings().pool.processes is None


def test_the_sample_file_holds_every_setting_with_its_default(file: Path) -> None:
    sample = (ROOT / "headrace.yaml").read_text()
    assert load(ROOT / "headrace.yaml", {}).settings == Settings(), "as it is, the sample changes nothing"
    loaded = _loaded(file, re.sub(r"^( *)#([a-z_]+:)", r"\1\2", sample, flags=re.MULTILINE))
    given = {dotted for dotted, origin in loaded.origins.items() if origin != "default"}
    assert given == set(leaves(Settings))
    assert loaded.settings.model_copy(update={"repository": Path("models")}) == Settings()
