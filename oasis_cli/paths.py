"""Paths as users write them."""

from pathlib import Path


def user_path(path: str | Path) -> Path:
    """A path given as text or as a `Path`; a leading `~` is the home folder, as in a shell.

    Recipes, notebooks and `--option=~/x` meet no shell that would expand it.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:  # nobody of that name, so it is a path like any other, to be said to be missing
        return Path(path)
