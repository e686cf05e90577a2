"""Data files that come with the package by bare name, and anybody's by path."""

import difflib
from pathlib import Path

from oasis_cli.errors import InputError
from oasis_cli.paths import user_path


def shipped_names(folder: Path) -> tuple[str, ...]:
    """Bare names of the YAML files in `folder`, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def find_file(name: str | Path, folder: Path, kind: str) -> Path:
    """The file that `name` means: a shipped one by its bare name, else a path.

    Args:
        name: bare name, or whatever looks like a path (a suffix .yaml, a folder, an existing file).
        folder: where the shipped files lie.
        kind: what the file describes, for the message.

    Raises:
        InputError: neither; the message lists what is shipped and the nearest name.
    """
    names = shipped_names(folder)
    if str(name) in names:
        return folder / f"{name}.yaml"
    path = user_path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        return path
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(
        f"{kind} {str(name)!r} is not known; {hint}use one of {', '.join(names)}, or the path of a YAML file"
    )
