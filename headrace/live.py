"""Changes of the repository that concern a running server: by its admin service if it runs, else on the disk.

A switch ordered from a server is proven before anybody is answered by it. Without a server there is nobody to ask; the
next one reads what was written.
"""

from shared.errors import UnknownModel
from shared.repository_writer import Removed, remove_version, set_current
from shared.settings import Settings
from shared.traffic import Traffic


def make_current(settings: Settings, name: str, version: str, by: str) -> Traffic:
    """All traffic of a model to this version. Raises HeadraceError, StartupError."""
    from headrace.admin_client import AdminClient  # noqa: PLC0415 - imports gRPC
    from headrace.admin_wire import NoServer  # noqa: PLC0415

    try:
        with AdminClient.connect(settings) as server:
            return server.switch(name, version)
    except (NoServer, UnknownModel):  # or it serves other models
        return set_current(settings.repository, name, version, by=by)


def remove(settings: Settings, name: str, version: str) -> Removed:
    """Remove a version that is not in use. Raises HeadraceError, StartupError."""
    # Asked before anything is locked: a server takes up a version only by its traffic, which is looked at then.
    used = in_use(settings, name)
    return remove_version(settings.repository, name, version, unless=lambda: used)


def in_use(settings: Settings, name: str) -> set[str]:
    """Versions of a model that a running server holds or is loading, whatever traffic.json says; else none."""
    from headrace.admin_client import AdminClient  # noqa: PLC0415 - imports gRPC
    from headrace.admin_wire import NoServer  # noqa: PLC0415

    try:
        with AdminClient.connect(settings) as server:
            found = server.models().versions
    except NoServer:
        return set()
    idle = {"", "unloaded", "failed"}
    return {state.version for state in found if state.model == name and (state.role or state.phase not in idle)}
