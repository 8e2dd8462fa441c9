"""Admin messages → orders and facts: everything that an admin can get wrong is refused here, with a sentence."""

import math
import os
import re
import time
from typing import Any

import msgspec

from gateway.api.interceptors import Context
from gateway.api.parse import check_model, shown
from gateway.orders import DropStandby, Order, Promote, RollBack, StartCanary, Switch
from protos.headrace.v1 import admin_pb2 as pb
from shared.errors import InvalidInput, InvalidOption, UnknownVersion
from shared.repository import Meta
from shared.traffic import By, Canary, Ramp

_USER = re.compile(r"[ -~]{0,64}")
_BY: dict[str, By] = {"": "routing_key", "routing_key": "routing_key", "request_id": "request_id"}

MAX_REASON = 500
MAX_TEXT = 1000
MAX_PARAMETERS = 64 * 1024
MAX_METRICS = 100


def model(name: str) -> str:
    """A model's name. Raises InvalidInput."""
    if not name:
        raise InvalidInput("the request names no model")
    check_model(name, "")
    return name


def version(given: str, field: str = "version") -> str:
    """A whole hash. Raises InvalidInput when there is none, UnknownVersion for what can't be one."""
    if not given:
        raise InvalidInput(f"{field} is empty: a version is 16 lower-case hexadecimal digits")
    try:
        check_model("", given)
    except UnknownVersion as error:
        raise UnknownVersion(error.text.replace("version is", f"{field} is", 1)) from None
    return given


def by(user: str, context: Context) -> str:
    """Who orders something, for the history: the name that the caller gives, and where the call came from.

    The socket lets only the server's own user in (and root, which counts as the same). Raises InvalidInput.
    """
    if not _USER.fullmatch(user):
        raise InvalidInput(f"user is {shown(user)}: it has 0..64 printable ASCII characters")
    peer = f"uid {os.geteuid()}" if context.peer().startswith("unix:") else "token"
    return f"{user} ({peer})" if user.strip() else peer


def order(request: pb.SetTrafficRequest) -> Order:
    """What is asked for. Raises InvalidInput, InvalidOption, UnknownVersion."""
    kind = request.WhichOneof("order")
    if kind == "switch":
        return Switch(version(request.switch.version, "switch.version"))
    if kind == "canary":
        return StartCanary(_canary(request.canary))
    if kind == "promote":
        return Promote()
    if kind == "rollback":
        ends = version(request.rollback.ends, "rollback.ends")
        return RollBack(_text(request.rollback.reason, "rollback.reason", MAX_REASON), ends=ends)
    if kind == "drop_standby":
        return DropStandby()
    raise InvalidInput("the request has no order: set switch, canary, promote, rollback or drop_standby")


def _canary(message: pb.Canary) -> Canary:
    """The steps of a ramp say the first share; a share of its own must agree with them."""
    by = _BY.get(message.by)
    if by is None:
        raise InvalidOption(f"canary.by is {shown(message.by)}: must be routing_key or request_id")
    found = version(message.version, "canary.version")
    steps = list(message.ramp.steps)
    if not steps:
        return Canary(version=found, percent=message.percent, by=by, shadow=message.shadow)
    if message.percent not in {0.0, steps[0]}:
        raise InvalidOption(f"canary.percent is {message.percent:g}, but the ramp starts with {steps[0]:g}")
    ramp = None
    if len(steps) > 1:
        every_s = message.ramp.every_s
        next_at_s = time.time() + every_s if math.isfinite(every_s) else 0.0  # which is refused with its rule
        ramp = Ramp(steps=steps, every_s=every_s, next_at_s=next_at_s)
    return Canary(version=found, percent=steps[0], by=by, shadow=message.shadow, ramp=ramp)


def meta(message: pb.Meta) -> Meta:
    """What a caller may say of a version. Raises InvalidInput."""
    for field in ("digest", "files", "created"):
        if getattr(message, field):
            raise InvalidInput(f"meta.{field} must not be set: the server computes it")
    parent = version(message.parent, "meta.parent") if message.parent else ""
    metrics = dict(message.metrics)
    if len(metrics) > MAX_METRICS:
        raise InvalidInput(f"meta.metrics has {len(metrics)} entries; the limit is {MAX_METRICS}")
    for name, value in metrics.items():
        _text(name, "a name in meta.metrics", MAX_TEXT)
        if not math.isfinite(value):
            raise InvalidInput(f"meta.metrics[{shown(name)}] is {value}: must be a finite number")
    hyperparameters = _object(message.hyperparameters_json)
    return Meta(
        source=_text(message.source, "meta.source", MAX_TEXT),
        licence=_text(message.licence, "meta.licence", MAX_TEXT),
        owner=_text(message.owner, "meta.owner", MAX_TEXT),
        data_version=_text(message.data_version, "meta.data_version", MAX_TEXT),
        parent=parent,
        metrics=metrics,
        hyperparameters=hyperparameters,
    )


def _object(text: str) -> dict[str, Any]:
    if len(text) > MAX_PARAMETERS:
        raise InvalidInput(f"meta.hyperparameters_json has {len(text)} characters; the limit is {MAX_PARAMETERS}")
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except (msgspec.DecodeError, RecursionError):
        raise InvalidInput("meta.hyperparameters_json is not a JSON object") from None


def _text(text: str, field: str, limit: int) -> str:
    if len(text) > limit:
        raise InvalidInput(f"{field} has {len(text)} characters; the limit is {limit}")
    if not text.isprintable():
        raise InvalidInput(f"{field} has characters that can't be printed")
    return text
