"""Changes of the repository that concern a running server: by its admin service if it runs, else on the disk.

A switch ordered from a server is proven before anybody is answered by it. Without a server there is nobody to ask; the
next one reads what was written.
"""

from shared.errors import UnknownModel
from shared.repository_garbage import collect_garbage
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
    from headrace.admin_client import AdminClient  # noqa: PLC0415 - imports gRPC
    from headrace.admin_wire import NoServer  # noqa: PLC0415

    try:
        with AdminClient.connect(settings) as server:  # which knows what it is about to take up
            return Removed(name, version, server.remove_version(name, version))
    except NoServer:
        return remove_version(settings.repository, name, version)


def collect(settings: Settings, name: str, *, keep: int, dry_run: bool) -> list[Removed]:
    """Remove a model's versions that nothing needs, and what crashes left. Raises HeadraceError, StartupError."""
    from headrace.admin_client import AdminClient  # noqa: PLC0415 - imports gRPC
    from headrace.admin_wire import NoServer  # noqa: PLC0415

    try:
        with AdminClient.connect(settings) as server:
            found = server.collect_garbage(name, keep=keep, dry_run=dry_run).removed
    except NoServer:
        return collect_garbage(settings.repository, name, keep=keep, dry_run=dry_run)
    return [Removed(each.model, each.version, each.bytes) for each in found]
