"""System shared memory: tensors that a client of this machine lays into a POSIX object instead of the message.

Off unless `gateway.system_shared_memory_prefix` is set, and then only objects whose name begins with it (`/`: all).

A region is read with `pread` and written with `pwrite`, never mapped. The object belongs to the client, who may
truncate it at any time: a mapping would then kill this process with SIGBUS at the next access, while a read just comes
back short, and that is one failed request. It costs nothing that counts: a mapped region would have to be copied once
as well, since the client could otherwise change a tensor after its checks.
"""

import errno
import os
import re
import stat
from types import TracebackType
from typing import NamedTuple, Self

from gateway.api.open_inference.model import Parameters
from gateway.api.open_inference.parameters import whole_number
from gateway.api.parse import shown
from shared.errors import InvalidInput, TooLarge, UnknownRegion, Unsupported

REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
"""Parameters of an input or a requested output."""

MAX_REGIONS = 1024
"""Each one holds a file descriptor."""
_KEY = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9._-]{0,250})")  # one name below /dev/shm: no further slash, no leading dot
_FOLDER = "/dev/shm"  # noqa: S108 - where the C library puts POSIX shared memory objects; the prefix guards it


class RegionStatus(NamedTuple):
    """One registered region, as its client described it; offset and size in bytes."""

    name: str
    key: str
    offset: int
    nbytes: int


class _Region:
    """An open object. Closed when it is no longer registered and no request uses it."""

    __slots__ = ("fd", "registered", "status", "users")

    def __init__(self, fd: int, status: RegionStatus) -> None:
        self.fd = fd
        self.status = status
        self.registered = True
        self.users = 0

    def forget(self) -> None:
        self.registered = False
        self.close_if_unused()

    def close_if_unused(self) -> None:
        if not self.registered and not self.users and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Place:
    """A part of a region that one request reads or writes; `with` keeps the region open that long."""

    __slots__ = ("_offset", "_region", "_where", "nbytes")

    def __init__(self, where: str, region: _Region, offset: int, nbytes: int) -> None:
        self._where = where
        self._region = region
        self._offset = region.status.offset + offset
        self.nbytes = nbytes

    def __enter__(self) -> Self:
        self._region.users += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._region.users -= 1
        self._region.close_if_unused()

    def read(self) -> bytes:
        """A copy of the bytes (one copy). Raises InvalidInput when the client has cut the object meanwhile."""
        data = os.pread(self._region.fd, self.nbytes, self._offset)
        if len(data) != self.nbytes:
            raise InvalidInput(
                f"{self._where}: only {len(data)} of {self.nbytes} bytes are left in region "
                f"{shown(self._region.status.name)}; its object was cut after it was registered"
            )
        return data

    def write(self, data: bytes | memoryview) -> None:
        """Copy a tensor to the place's beginning. Raises InvalidInput when it has no room there."""
        where, name = self._where, shown(self._region.status.name)
        if len(data) > self.nbytes:
            raise InvalidInput(f"{where} has {len(data)} bytes; its part of region {name} has {self.nbytes}")
        # `pwrite` would make a cut object longer again. A cut between this look and the write does that too, but never
        # beyond the size that was registered: the client pays with its own memory, and nothing of ours is touched.
        if os.fstat(self._region.fd).st_size < self._offset + len(data):
            raise InvalidInput(f"{where} has no room in region {name}; its object was cut after it was registered")
        view, offset = memoryview(data), self._offset
        while view.nbytes:
            try:
                written = os.pwrite(self._region.fd, view, offset)
            except OSError as error:
                raise InvalidInput(f"{where} can't be written to region {name}: {error.strerror}") from None
            view, offset = view[written:], offset + written


class SharedMemory:
    """All registered regions. Event loop only."""

    def __init__(self, prefix: str, max_bytes: int) -> None:
        """`prefix` of allowed object names, `/`: all, empty: off. `max_bytes`: of one tensor."""
        self.is_on = bool(prefix)
        """Whether the extension is offered."""
        self._prefix = prefix.removeprefix("/")
        self._max_bytes = max_bytes
        self._regions: dict[str, _Region] = {}

    def register(self, status: RegionStatus) -> None:
        """Open the object. Raises Unsupported (off), InvalidInput, UnknownRegion (no such object), TooLarge."""
        self._require_on()
        name, key, offset, nbytes = status
        if not 1 <= len(name) <= 128:
            raise InvalidInput(f"the region's name has {len(name)} characters; 1..128 are allowed")
        if name in self._regions:
            raise InvalidInput(f"region {shown(name)} is already registered; unregister it first")
        if nbytes < 1 or offset < 0:
            raise InvalidInput(f"region {shown(name)} has {nbytes} bytes from {offset}; at least 1 is needed")
        if len(self._regions) >= MAX_REGIONS:
            raise TooLarge(f"{MAX_REGIONS} regions are registered, and more are not allowed; unregister some first")
        fd = self._open(key)
        size = os.fstat(fd).st_size
        if offset + nbytes > size:
            os.close(fd)
            raise InvalidInput(
                f"region {shown(name)} ends at byte {offset + nbytes} of {shown(key)}, which has {size} bytes"
            )
        self._regions[name] = _Region(fd, status)

    def unregister(self, name: str) -> None:
        """Forget a region, or all when `name` is empty; an unknown one is fine. Requests that use it still finish."""
        self._require_on()
        for each in [name] if name else list(self._regions):
            region = self._regions.pop(each, None)
            if region is not None:
                region.forget()

    def status(self, name: str) -> list[RegionStatus]:
        """One region, or all when `name` is empty. Raises UnknownRegion."""
        self._require_on()
        return [self._region(name).status] if name else [region.status for region in self._regions.values()]

    def place(self, where: str, parameters: Parameters) -> Place:
        """What the parameters of an input or output point at. `where` begins each refusal's sentence.

        Raises UnknownRegion, InvalidInput (a parameter, or beyond the region), TooLarge.
        """
        name = parameters[REGION]
        if not isinstance(name, str):
            raise InvalidInput(f"{where}: parameter {REGION} is {shown(str(name))}; it takes a text")
        nbytes = whole_number(where, parameters, SIZE, None)
        offset = whole_number(where, parameters, OFFSET, 0)
        region = self._region(name)
        if offset + nbytes > region.status.nbytes:
            raise InvalidInput(
                f"{where}: {nbytes} bytes from {offset} end beyond region {shown(name)}, "
                f"which has {region.status.nbytes}"
            )
        if nbytes > self._max_bytes:
            raise TooLarge(f"{where} has {nbytes} bytes; the limit is {self._max_bytes} (gateway.max_message_bytes)")
        return Place(where, region, offset, nbytes)

    def close(self) -> None:
        """Forget everything."""
        if self.is_on:
            self.unregister("")

    def _require_on(self) -> None:
        if not self.is_on:
            raise Unsupported("system shared memory is switched off (gateway.system_shared_memory_prefix is empty)")

    def _region(self, name: str) -> _Region:
        try:
            return self._regions[name]
        except KeyError:
            off = "" if self.is_on else "; shared memory is switched off (gateway.system_shared_memory_prefix is empty)"
            raise UnknownRegion(f"shared memory region {shown(name)} is not registered{off}") from None

    def _open(self, key: str) -> int:
        match = _KEY.fullmatch(key)
        if match is None or not match[1].startswith(self._prefix):
            raise InvalidInput(
                f"key is {shown(key)}: this server takes objects whose name begins with {shown(self._prefix)} "
                "(gateway.system_shared_memory_prefix) and has only A-Z a-z 0-9 . _ -"
            )
        try:
            # O_NOFOLLOW: a symbolic link would lead out of the folder. O_NONBLOCK: a FIFO would block the open.
            fd = os.open(f"{_FOLDER}/{match[1]}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise UnknownRegion(f"there is no shared memory object {shown(key)}") from None
            raise InvalidInput(f"shared memory object {shown(key)} can't be opened: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidInput(f"{shown(key)} is no shared memory object")
        return fd
