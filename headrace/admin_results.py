"""What the admin client gives: plain data with a JSON form. Traffic itself is `shared.traffic.Traffic`."""

from typing import Any

import msgspec

from shared.traffic import Canary, Traffic, unnamed_ending


class VersionState(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one model, as the server sees it; words and units as in admin.proto."""

    model: str
    version: str
    role: str = ""
    phase: str = ""
    reason: str = ""
    refused: str = ""
    share: float = 0.0
    """Percent of the callers."""
    memory_bytes: int = 0
    load_s: float = 0.0
    stages_s: dict[str, float] = {}
    precision: str = ""
    row_cap: int = 0
    uses: int = 0
    uses_per_minute: float = 0.0
    stored_bytes: int = 0
    notes: list[str] = []
    """What is to be known of it although it answers."""


class WorkerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's memory holds."""

    worker: str
    budget_bytes: int = 0
    models_bytes: int = 0
    process_bytes: int = 0
    loads: int = 0
    evictions: int = 0


class Models(msgspec.Struct, frozen=True):
    """Every version, and the workers' memory."""

    versions: list[VersionState]
    memory: list[WorkerMemory]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A version with where it comes from."""

    state: VersionState
    meta: dict[str, Any] | None = None
    """meta.json; None when it can't be read, for which `fault` is the reason."""
    fault: str = ""
    file_bytes: dict[str, int] = {}
    """By its relative name, of each file that is there."""


class Model(msgspec.Struct, frozen=True):
    """Everything that is known of one model."""

    model: str
    versions: list[Version]
    traffic: Traffic
    fault: str = ""
    """Why traffic.json can't be used."""
    pipeline: str = ""
    backend: str = ""


class VersionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a version has done since the canary started."""

    version: str
    role: str = ""
    share: float = 0.0
    """Percent of the callers."""
    requests: int = 0
    errors: int = 0
    nonfinite: int = 0
    slow: int = 0
    """Of `batches`."""
    batches: int = 0
    compared: int = 0
    disagreed: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0


class TrafficNow(msgspec.Struct, frozen=True):
    """Who is answered by which version, and how well."""

    traffic: Traffic
    """In force."""
    figures: list[VersionFigures] = []
    coming: Traffic | None = None
    """What traffic.json says, while that is not in force: it is being loaded, or was refused."""
    refused: str = ""
    unwritten: str = ""
    """Why what is in force is not in traffic.json yet."""

    @property
    def loading(self) -> Canary | None:
        """A canary that is to have its share as soon as it can answer."""
        coming = self.coming
        if coming is None or self.traffic.canary is not None or coming.current != self.traffic.current:
            return None
        return coming.canary

    @property
    def ending(self) -> str:
        """What a rollback that names nothing ends. Raises Conflict when that can't be meant."""
        return self.loading.version if self.loading is not None else unnamed_ending(self.traffic)


class Added(msgspec.Struct, frozen=True):
    """A version that was taken in."""

    model: str
    version: str
    present: bool = False
    """The same content was there already."""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One version, hashed again."""

    model: str
    version: str
    fault: str = ""
    done: int = 0
    total: int = 0
    bytes: int = 0


class Removed(msgspec.Struct, frozen=True):
    """What is no longer there; without a version: what a crashed writer left."""

    model: str
    version: str = ""
    bytes: int = 0


class Collected(msgspec.Struct, frozen=True):
    """What a garbage collection has deleted, or would."""

    removed: list[Removed]
    freed_bytes: int = 0


class Difference(msgspec.Struct, frozen=True):
    """One thing. None: not there."""

    what: str
    before: Any
    after: Any


class Weights(msgspec.Struct, frozen=True):
    """Two safetensors files of one name, compared by their headers."""

    file: str
    differences: list[Difference]
    same_layout: int
    unread_values: int


class Diff(msgspec.Struct, frozen=True):
    """What two versions differ in."""

    before: str
    after: str
    differences: list[Difference]
    weights: list[Weights]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a watch."""

    whole: bool = False
    """The first one: what is not in it is not there."""
    versions: list[VersionState] = []
    removed: list[VersionState] = []
    traffic: dict[str, Traffic] = {}
    """By model."""
    memory: list[WorkerMemory] = []
