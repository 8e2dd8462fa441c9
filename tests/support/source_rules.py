"""What no file of ours may contain, as functions over a parsed file. Used by tests/architecture."""

import ast
import re
from collections.abc import Callable, Iterator

from tests.support.source import Source

Finding = tuple[int, str]
"""Line number, and what is wrong there."""
Rule = Callable[[Source], Iterator[Finding]]

_UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_UNSAFE_YAML = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}
_FORKS = {"os.fork", "os.forkpty", "pty.fork"}
_SLEEPS = {"time.sleep", "asyncio.sleep", "trio.sleep", "anyio.sleep"}
_MAY_PRINT = ("headrace/", "bench/", "deploy/")


def no_pickle(source: Source) -> Iterator[Finding]:
    """Weights and messages are data: nothing that can run code when it is read. Tests may write one, to be refused."""
    for call, name in _calls(source):
        if name.split(".")[0] in _UNSAFE_MODULES and name.split(".")[-1] in {"load", "loads", "Unpickler", "open"}:
            yield call.lineno, name
    for node in ast.walk(source.tree):
        if source.is_test or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for name in names:
            if name.split(".")[0] in _UNSAFE_MODULES:
                yield node.lineno, f"imports {name}"


def no_unsafe_load(source: Source) -> Iterator[Finding]:
    """`torch.load` only with a literal weights_only=True; of yaml only the safe loader; numpy without pickle."""
    for call, name in _calls(source):
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if name == "torch.load" and not _is_literal(keywords.get("weights_only"), value=True):
            yield call.lineno, "torch.load without weights_only=True"
        if name.startswith("yaml.") and name.removeprefix("yaml.") in _UNSAFE_YAML and not _safe_loader(keywords):
            yield call.lineno, f"{name}: use a subclass of yaml.SafeLoader"
        if name.split(".")[0] in {"np", "numpy"} and _is_literal(keywords.get("allow_pickle"), value=True):
            yield call.lineno, f"{name} with allow_pickle"


def no_code_from_data(source: Source) -> Iterator[Finding]:
    """No eval, no exec, no shell."""
    for call, name in _calls(source):
        if name in {"eval", "exec", "os.system", "os.popen", "subprocess.getoutput"}:
            yield call.lineno, name
        for keyword in call.keywords:
            if keyword.arg == "shell" and not _is_literal(keyword.value, value=False):
                yield call.lineno, f"{name} with shell"


def no_objects_on_sockets(source: Source) -> Iterator[Finding]:
    """ZeroMQ carries our typed messages only; PUB/SUB drops silently, zmq.asyncio costs more than add_reader."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in {"recv_pyobj", "send_pyobj", "recv_json", "send_json"}:
            yield node.lineno, node.attr
        if isinstance(node, ast.Attribute) and _dotted(node) in {"zmq.PUB", "zmq.SUB", "zmq.XPUB", "zmq.XSUB"}:
            yield node.lineno, _dotted(node)
        if isinstance(node, ast.Import | ast.ImportFrom) and "zmq.asyncio" in ast.unparse(node):
            yield node.lineno, "zmq.asyncio"


def no_fork(source: Source) -> Iterator[Finding]:
    """After gRPC or CUDA has started a forked child deadlocks: processes are spawned."""
    for call, name in _calls(source):
        if source.is_product and name in _FORKS:
            yield call.lineno, name
        if source.is_product and any(keyword.arg == "preexec_fn" for keyword in call.keywords):
            yield call.lineno, f"{name} with preexec_fn"


def no_assert_in_product(source: Source) -> Iterator[Finding]:
    """`python -O` drops asserts, so none may guard anything."""
    for node in ast.walk(source.tree):
        if source.is_product and isinstance(node, ast.Assert):
            yield node.lineno, "assert"


def no_bare_sleep_in_tests(source: Source) -> Iterator[Finding]:
    """A test waits for an event with a limit. A sleep needs a comment on its line or just above that says why."""
    lines = source.lines
    for call, name in _calls(source):
        if not source.is_test or name not in _SLEEPS or _is_literal(next(iter(call.args), None), value=0):
            continue
        near = lines[max(0, call.lineno - 2) : call.lineno]
        if not any("#" in line for line in near):
            yield call.lineno, f"{name} without a stated reason"


def no_print(source: Source) -> Iterator[Finding]:
    """A server logs; only the command line and scripts print."""
    for call, name in _calls(source):
        if name == "print" and not source.path.startswith(_MAY_PRINT):
            yield call.lineno, "print"


def log_events_are_phrases(source: Source) -> Iterator[Finding]:
    """An event is a short phrase for people; what varies is in its fields. One style in all processes."""
    for call, name in _calls(source):
        first = next(iter(call.args), None)
        if not source.is_product or not re.search(r"log(ger)?\.(debug|info|warning|error|exception)$", name):
            continue
        if isinstance(first, ast.Constant) and "_" in str(first.value):
            yield call.lineno, str(first.value)


RULES: dict[Rule, tuple[str, str]] = {
    no_pickle: ("shared/x.py", "def f():\n    import pickle.x"),
    no_unsafe_load: ("workers/x.py", "torch.load(path, weights_only=flag)"),
    no_code_from_data: ("bench/x.py", "subprocess.run(line, shell=True)"),
    no_objects_on_sockets: ("shared/x.py", "socket.recv_pyobj()"),
    no_fork: ("gateway/x.py", "os.fork()"),
    no_assert_in_product: ("gateway/x.py", "assert True"),
    no_bare_sleep_in_tests: ("tests/x.py", "async def f():\n    x = 1\n    await asyncio.sleep(1)"),
    no_print: ("gateway/x.py", "print(1)"),
    log_events_are_phrases: ("workers/x.py", "_log.info('model_loaded')"),
}
"""Every rule with a file that breaks it: a rule that can't fail is none."""


def _calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node, _dotted(node.func)


def _dotted(node: ast.expr) -> str:
    """`a.b.c` for such an expression, with `?` for a part that is no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return "?"


def _is_literal(node: ast.expr | None, *, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def _safe_loader(keywords: dict[str | None, ast.expr]) -> bool:
    loader = keywords.get("Loader")
    return loader is not None and _dotted(loader) == "yaml.SafeLoader"
