"""`Admin.AddVersion`: a stream of bytes becomes a version, or nothing."""

import asyncio
from pathlib import Path

import grpc
import msgspec

from gateway.api import admin_parse
from gateway.api.admin_disk import Disk
from gateway.api.admin_spool import NewFile, Spool
from gateway.api.interceptors import Call, Edge
from gateway.api.parse import shown
from protos.headrace.v1 import admin_pb2 as pb
from shared.errors import DeadlineExceeded, InvalidInput, TooLarge, UnknownModel
from shared.repository import META_FILE, Meta, Repository
from shared.repository_sources import is_file_name

MAX_CHUNK_BYTES = 4 * 1024 * 1024
MAX_FILES = 1000
MAX_VERSION_BYTES = 256 * 1024**3
"""Far above what one worker serves, and still a bound for a stream that never ends."""
MAX_NAME = 512
CHUNK_LIMIT_S = 60.0
"""The longest silence of a caller: its place is wanted by others."""


class Uploads:
    """Takes new versions in. Event loop only."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk

    async def add(self, edge: Edge, call: Call) -> pb.AddVersionResponse:
        """Read the stream and store what came. Raises HeadraceError; then nothing is left of it."""
        first = await _next(edge, call)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidInput("the first message of the stream must be the header")
        name, files, meta = _header(first.header)
        by = admin_parse.by(first.header.user, call.context)
        with self._disk.large():
            await self._disk.run(self._check_model, name)
            spool = Spool(self._root, files)
            try:
                await self._disk.run(spool.prepare)
                await self._fill(spool, edge, call)
                added = await self._disk.run(spool.store, name, meta, by)
            finally:  # also when the caller has left; what still runs in a thread is waited for there
                await asyncio.shield(self._disk.run(spool.remove))
        return pb.AddVersionResponse(model=name, version=added.version, present=added.present)

    async def _fill(self, spool: Spool, edge: Edge, call: Call) -> None:
        while (message := await _next(edge, call)) is not None:
            if message.WhichOneof("part") != "chunk" or not message.chunk:
                raise InvalidInput("after the header only chunks of 1 byte or more may follow")
            if len(message.chunk) > MAX_CHUNK_BYTES:
                raise TooLarge(f"a chunk has {len(message.chunk)} bytes; the limit is {MAX_CHUNK_BYTES}")
            await self._disk.run(spool.write, message.chunk)

    def _check_model(self, name: str) -> None:
        if name not in Repository(self._root).names():
            raise UnknownModel(
                f"model {name!r} has no folder with a model.yaml in the server's repository: make it there first"
            )


async def _next(edge: Edge, call: Call) -> pb.AddVersionRequest | None:
    """The next message; None at the end."""
    try:
        async with asyncio.timeout(CHUNK_LIMIT_S):
            raw = await call.context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"nothing came for {CHUNK_LIMIT_S:g} s; the version is not stored") from None
    return None if raw is grpc.aio.EOF else edge.parse(pb.AddVersionRequest.FromString, raw)


def _header(header: pb.AddVersionHeader) -> tuple[str, list[NewFile], Meta]:
    name = admin_parse.model(header.model)
    if not 1 <= len(header.files) <= MAX_FILES:
        raise InvalidInput(f"the header names {len(header.files)} files; a version has 1 to {MAX_FILES}")
    files = [NewFile(file.name, file.size) for file in header.files]
    for file in files:
        if len(file.name) > MAX_NAME or not is_file_name(file.name):
            raise InvalidInput(
                f"{shown(file.name)} can't be a file of a version: letters, digits and . _ - only, and not {META_FILE}"
            )
        if not file.nbytes:
            raise InvalidInput(f"{file.name} is empty: a file of a version has 1 byte or more")
    if len({file.name for file in files}) < len(files):
        raise InvalidInput("the header names a file twice")
    if (total := sum(file.nbytes for file in files)) > MAX_VERSION_BYTES:
        raise TooLarge(f"the version has {total} bytes; the limit is {MAX_VERSION_BYTES}")
    meta = admin_parse.meta(header.meta)
    return name, files, msgspec.structs.replace(meta, source=meta.source or "admin service")
