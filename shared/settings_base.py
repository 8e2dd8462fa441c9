"""What the groups of the settings are made of, and the groups about models' lives. Used through `shared.settings`."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from shared import addresses

Bytes = Annotated[int, Field(gt=0)]
Milliseconds = Annotated[int, Field(gt=0)]


def _address(text: str) -> str:
    try:
        addresses.split(text)
    except ValueError as error:
        raise PydanticCustomError("address", "{rule}", {"rule": str(error)}) from None
    return text


def _named(path: Any) -> Any:  # noqa: ANN401 - whatever was given, still unchecked
    if isinstance(path, str) and not path.strip():  # a Path of no name would mean the present folder
        raise PydanticCustomError("folder", "must not be empty")
    return path


Address = Annotated[str, AfterValidator(_address)]
Folder = Annotated[Path, BeforeValidator(_named)]


class Group(BaseModel):
    """Frozen, and no key but its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CacheSettings(Group):
    """What is not computed twice. Off by default; `cache: false` in model.yaml leaves a model out.

    With several gateways each has its share of the budgets, and knows only what has come to it.
    """

    results_budget_bytes: Annotated[int, Field(ge=0)] = 0
    """Answers kept, by input, options and version; 0: none."""
    prepared_budget_bytes: Annotated[int, Field(ge=0)] = 0
    """Prepared tensors kept, by input, options and preprocessing: they outlive a change of version; 0: none."""
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0
    """How long what is kept may be used."""
    single_flight: bool = False
    """Identical requests that come while one of them is worked on wait for its answer."""


class GuardSettings(Group):
    """When a canary is rolled back without being asked: it is compared with the current version as answers come."""

    enabled: bool = True
    min_samples: Annotated[int, Field(ge=1)] = 20
    """Answers of the canary, and of the current version, before anything is concluded."""
    slow_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    """A batch is slow when it takes so many times what the current version needs for one of the same size."""
    false_alarm: Annotated[float, Field(gt=0, lt=0.5)] = 0.001
    """Chance that a canary that is as good as the current version is ever rolled back."""
    error_floor: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Share of bad answers that is never held against a canary."""


class AdminSettings(Group):
    """The admin service. It always listens on a Unix socket in the runtime folder, for the server's own user."""

    address: str = ""
    """host:port to listen on, too; needs certificate, key and token_file. Empty: not on TCP."""
    certificate: Path | None = None
    """PEM, with its chain."""
    key: Path | None = None
    """PEM, not encrypted."""
    token_file: Path | None = None
    """One line: what callers send as `authorization: Bearer …`; at least 16 characters."""

    @model_validator(mode="after")
    def _agree(self) -> "AdminSettings":
        if not self.address:
            return self
        _address(self.address)
        missing = [name for name in ("certificate", "key", "token_file") if getattr(self, name) is None]
        if missing:
            raise ValueError(f"admin.address needs admin.{missing[0]}: it is never served without TLS and a token")
        return self
