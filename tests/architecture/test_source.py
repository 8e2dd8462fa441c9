"""What the whole tree promises about its source: no unsafe calls, no machine's traces, files that fit in a head."""

import re

import pytest

from tests.support.source import PRODUCT, ROOT, parse, sources, text_files
from tests.support.source_rules import RULES, Rule

MAX_LINES = 300
MAX_TEST_LINES = 700
"""A test file mirrors one source file, and its cases are read one by one."""
LONG_FILES = {
    "shared/transport.py": "the only importer of zmq, by contract, so both typed channels stand in it",
    "shared/handover.py": "both ends of one greeting, to be read side by side",
}
"""Files allowed to be a little longer, each with its reason."""
LONG_FILE_LINES = 330

# Split so that this file does not contain what it looks for.
MACHINE = re.compile(r"(?<![\w.}$])/" + r"(?:root|home|Users|work|mnt)" + r"/\w")
REGISTRY = re.compile(
    r"pypi\." + r"org|python" + r"hosted\.org|npm" + r"js\.|--(?:extra-)?index" + r"-url|--find" + r"-links"
)


def _limit(path: str) -> int:
    if path in LONG_FILES:
        return LONG_FILE_LINES
    return MAX_TEST_LINES if "/test_" in path else MAX_LINES


def _offences(rule: Rule) -> list[str]:
    return [f"{source.path}:{line}: {what}" for source in sources() for line, what in rule(source)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks(rule: Rule) -> None:
    assert not _offences(rule), rule.__doc__


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_its_own_example(rule: Rule) -> None:
    assert list(rule(parse(*RULES[rule])))


def test_the_walk_sees_the_whole_product() -> None:
    seen = {source.path.split("/")[0] for source in sources()}
    assert seen.issuperset({*PRODUCT, "tests", "bench", "protos"})


def test_files_are_short() -> None:
    long = {source.path: len(source.lines) for source in sources() if len(source.lines) > _limit(source.path)}
    assert not long


@pytest.mark.parametrize("forbidden", [MACHINE, REGISTRY], ids=["machine paths", "registry hosts and options"])
def test_no_trace_of_a_machine(forbidden: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert not found


def test_folders_with_an_entry_point_are_the_process_list() -> None:
    entries = sorted(path.parent.name for path in ROOT.glob("*/__main__.py"))
    # `headrace` is the command line; `headrace serve` is the supervisor.
    assert entries == ["gateway", "headrace", "preprocess_pool", "workers"]


def test_bare_silencing_is_not_used() -> None:
    bare = re.compile(r"#\s*(?:noqa(?!:)|type:\s*ignore(?!\[))")
    found = [f"{s.path}:{n}" for s in sources() for n, line in enumerate(s.lines, 1) if bare.search(line)]
    assert not found
