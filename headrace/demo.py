"""`headrace demo`: each task on real input through the whole server, beside what is true."""

import contextlib
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
from rich.console import Console

from headrace import demo_photos, demo_tasks, zoo
from headrace.client import Client
from headrace.client_errors import InferenceError
from headrace.demo_server import running
from headrace.demo_tasks import Demo, Part, verdict
from headrace.many_inputs import reason_of
from headrace.output import literal
from headrace.zoo_packages import cache_of
from headrace.zoo_samples import fetch_photos, fetch_pictures
from shared.errors import ExitCode, StartupError
from shared.settings_loader import load


class _Task(NamedTuple):
    model: str
    part: Part


TASKS = {
    "classify": _Task(zoo.DEFAULT_MODEL, demo_photos.classify),
    "detect": _Task("yolov3-tiny", demo_tasks.detect),
    "embed": _Task("all-minilm-l6-v2", demo_tasks.embed),
    "texts": _Task("toxic-comment", demo_tasks.texts),
    "generate": _Task("smollm2-135m", demo_tasks.generate),
}
"""In the order in which they are shown."""


def run(address: str | None, config: Path | None, tasks: Sequence[str] = ()) -> int:
    """Fetch what is missing, start a server (or use the one at `address`), show the tasks. Returns 0 or 1.

    `tasks`: names out of TASKS, none for all. Its own server serves a repository of its own, in the cache, so that the
    user's stays as it is. Raises StartupError.
    """
    wanted = _wanted(tasks)
    console = Console()
    samples = load(config).settings.repository
    repository = cache_of(samples) / "demo" / "models"
    models = [task.model for task in wanted.values()]
    with contextlib.ExitStack() as stack:
        if address is None:
            _fetch(console, wanted, models, repository, samples)
            started_s = time.monotonic()
            with console.status(f"starting a server with {len(models)} model(s)"):
                address = stack.enter_context(running(models, repository, config))
            console.print(f"server ready after {time.monotonic() - started_s:.1f} s on {address}", highlight=False)
        else:
            # For the names of the true classes; nothing else of the models there is needed here.
            _fetch(console, wanted, [zoo.DEFAULT_MODEL] if "classify" in wanted else [], repository, samples)
        client = stack.enter_context(Client(address))
        demo = Demo(console, client, repository, samples)
        right = [_shown(demo, task) for task in wanted.values()]
    return 0 if all(right) else 1


def _wanted(tasks: Sequence[str]) -> dict[str, _Task]:
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise StartupError(ExitCode.BAD_SETTINGS, f"--task is {unknown[0]!a}; known: {', '.join(TASKS)}")
    return {name: task for name, task in TASKS.items() if not tasks or name in tasks}


def _fetch(console: Console, tasks: Collection[str], models: Sequence[str], repository: Path, samples: Path) -> None:
    """The models, and the samples of the tasks. Downloads stay in the cache of the samples. Raises StartupError."""
    with console.status("fetching models and samples") as status:

        def show(text: str) -> None:
            status.update(literal(text))

        for model in models:
            zoo.fetch(model, repository, show, cache_of(samples))
        if "classify" in tasks:
            fetch_photos(samples, show)
        if "detect" in tasks:
            fetch_pictures(samples, show)


def _shown(demo: Demo, task: _Task) -> bool:
    """One part; what is not served at the user's own server is told, and no failure of the demo."""
    try:
        return task.part(demo)
    except InferenceError as error:
        if error.reason == "unreachable":
            raise StartupError(ExitCode.PEER_LOST, f"demo: {reason_of(error)}") from error
        if error.code is grpc.StatusCode.NOT_FOUND:
            demo.console.print(f"– {task.model} is not served there; to add it: headrace models add zoo:{task.model}")
            return True
        return verdict(demo.console, f"{task.model}: {reason_of(error)}", good=False)
