"""The admin service's part about what is stored: RemoveVersion, Verify, CollectGarbage, Diff, and what there is."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from gateway.api import admin_parse, admin_render
from gateway.api.admin_calls import only_message
from gateway.api.admin_disk import Disk
from gateway.api.admin_render import Key
from gateway.api.interceptors import Call, Edge
from protos.headrace.v1 import admin_pb2 as pb
from shared.errors import InvalidInput, StartupError
from shared.logs import get_logger
from shared.model_config import config_bytes, parse_config
from shared.repository import META_FILE, VERSIONS, Meta, Repository, read_json
from shared.repository_diff import VersionDiff, diff
from shared.repository_files import faults
from shared.repository_garbage import KEEP, collect_garbage
from shared.repository_writer import Removed, remove_version, role_of
from shared.traffic import Traffic
from shared.traffic_repair import missing

MAX_KEEP = 1000
LOOP_LIMIT_S = 5.0
"""How long a thread that has a model's folder locked waits for the event loop, which may be ending."""

log = get_logger()


class Storage:
    """Event loop only; what touches the disk runs in threads."""

    def __init__(self, root: Path, disk: Disk, in_use: Callable[[], Awaitable[set[Key]]]) -> None:
        """`in_use`: versions that the server holds, whatever traffic.json says."""
        self._root = root
        self._disk = disk
        self._in_use = in_use

    def stored(self) -> set[Key]:
        """Every version of the repository. Blocking. Raises RepositoryError."""
        repository = Repository(self._root)
        return {(name, version) for name in repository.names() for version in repository.versions(name)}

    def model(self, name: str) -> pb.GetModelResponse:
        """One model as it is stored. Blocking. Raises UnknownModel, RepositoryError."""
        repository = Repository(self._root)
        stored, traffic, fault = repository.versions(name), Traffic(current=""), ""
        try:
            traffic = repository.traffic(name)
        except StartupError as error:
            fault = error.text
        found = pb.GetModelResponse(model=name, traffic=admin_render.traffic(traffic), fault=fault)
        found.versions.extend(self._version(name, version) for version in stored)
        for version in traffic.wanted():
            if version not in stored:
                state = pb.VersionState(model=name, version=version)
                found.versions.append(pb.Version(state=state, fault=missing(name, version, role_of(traffic, version))))
        with contextlib.suppress(StartupError):
            config = parse_config(config_bytes(self._root / name), name)
            found.pipeline, found.backend = config.pipeline, config.backend
        return found

    def _version(self, name: str, version: str) -> pb.Version:
        state = pb.VersionState(model=name, version=version)
        folder = self._root / name / VERSIONS / version
        try:
            meta = read_json(folder / META_FILE, Meta)
        except StartupError as error:
            return pb.Version(state=state, fault=error.text)
        sizes = {file: (folder / file).lstat().st_size for file in meta.files if (folder / file).is_file()}
        state.stored_bytes = sum(sizes.values())
        return pb.Version(state=state, meta=admin_render.meta(meta), file_bytes=sizes)

    async def remove(self, request: pb.RemoveVersionRequest, call: Call) -> pb.RemoveVersionResponse:
        """Delete a version that is not in use."""
        name, version = admin_parse.model(request.model), admin_parse.version(request.version)
        by = admin_parse.by(request.user, call.context)
        removed: Removed = await self._disk.run(
            remove_version, self._root, name, version, unless=self._asked_from_a_thread(name)
        )
        log.info("version removed", model=name, version=version, bytes=removed.nbytes, by=by)
        return pb.RemoveVersionResponse(freed_bytes=removed.nbytes)

    async def collect(self, request: pb.CollectGarbageRequest, call: Call) -> pb.CollectGarbageResponse:
        """Delete what nothing needs, of one model or of all; or only tell."""
        name = admin_parse.model(request.model) if request.model else ""
        by = admin_parse.by(request.user, call.context)
        keep = request.keep if request.HasField("keep") else KEEP
        if keep > MAX_KEEP:
            raise InvalidInput(f"keep is {keep}: must be 0 to {MAX_KEEP}")
        found: list[Removed] = []
        with self._disk.large():
            for each in [name] if name else await self._disk.run(self._names):
                found += await self._disk.run(
                    collect_garbage,
                    self._root,
                    each,
                    keep=keep,
                    dry_run=request.dry_run,
                    unless=self._asked_from_a_thread(each),
                )
        if found and not request.dry_run:
            log.info("garbage collected", versions=[f"{each.name}/{each.version}" for each in found], by=by)
        return pb.CollectGarbageResponse(
            removed=[pb.Removed(model=each.name, version=each.version, bytes=each.nbytes) for each in found],
            freed_bytes=sum(each.nbytes for each in found),
        )

    def _asked_from_a_thread(self, name: str) -> Callable[[], set[str]]:
        """Which versions of a model the server holds at the moment of the call, while the disk is locked."""
        loop = asyncio.get_running_loop()

        async def now() -> set[str]:
            return {version for model, version in await self._in_use() if model == name}

        return lambda: asyncio.run_coroutine_threadsafe(now(), loop).result(LOOP_LIMIT_S)

    async def diff(self, request: pb.DiffRequest, _call: Call) -> pb.DiffResponse:
        """What two versions differ in."""
        name, after = admin_parse.model(request.model), admin_parse.version(request.to_version, "to_version")
        before = admin_parse.version(request.from_version, "from_version") if request.from_version else ""
        with self._disk.large():
            found = await self._disk.run(self._difference, name, before, after)
        return admin_render.difference(found)

    def _difference(self, name: str, before: str, after: str) -> VersionDiff:
        repository = Repository(self._root)
        return diff(repository.open(name, before), repository.open(name, after))

    async def verify(self, edge: Edge, call: Call) -> None:
        """Hash every file again, one version after another; each one's outcome is told at once."""
        request = await only_message(edge, call, pb.VerifyRequest.FromString)
        name = admin_parse.model(request.model) if request.model else ""
        with self._disk.large():
            versions = await self._disk.run(self._versions, name)
            for done, (model, version) in enumerate(versions, 1):
                fault, nbytes = await self._disk.run(self._verified, model, version)
                answer = pb.VerifyResponse(
                    model=model, version=version, fault=fault, done=done, total=len(versions), bytes=nbytes
                )
                await call.context.write(answer.SerializeToString())

    def _names(self) -> list[str]:
        return Repository(self._root).names()

    def _versions(self, name: str) -> list[Key]:
        repository = Repository(self._root)
        names = [name] if name else repository.names()
        return [(each, version) for each in names for version in repository.versions(each)]

    def _verified(self, name: str, version: str) -> tuple[str, int]:
        """The version's first fault, if any, and the bytes that were hashed."""
        hashed: list[int] = []
        try:
            found = Repository(self._root).open(name, version)
            fault = next(faults(found.files, found.meta.files, hashed.append), "")
        except StartupError as error:
            fault = error.text
        return fault, sum(hashed)
