"""The files of this clone that a module imports, transitively: a part's results depend on them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

OWN = ("pillion", "lab", "tests")
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([\w.]+))", re.M)


def used_files(root: Path, path: Path) -> list[str]:
    """Return the paths of ``path`` and of all that it imports from the clone at ``root``, also within functions."""
    seen, waiting = {path}, [path]
    while waiting:
        fresh = _imported(root, waiting.pop()) - seen
        seen |= fresh
        waiting += fresh
    return sorted(each.relative_to(root).as_posix() for each in seen)


@functools.cache
def _imported(root: Path, path: Path) -> frozenset[Path]:
    found = set()
    for package, names, module in _IMPORT.findall(path.read_text("utf-8")):
        source = package or module
        if source.split(".")[0] in OWN:
            # A name imported from a package may be one of its modules.
            found |= {_file_of(root, each) for each in (source, *(f"{source}.{name}" for name in _names(names)))}
    return frozenset(each for each in found if each is not None)


def _names(text: str) -> list[str]:
    return re.findall(r"\w+", text.partition("#")[0] if "(" not in text else text)


@functools.cache
def _file_of(root: Path, module: str) -> Path | None:
    """Return a module's file; folders of services are reached by links from ``pillion``."""
    place = root.joinpath(*module.split("."))
    return next((each.resolve() for each in (place.with_suffix(".py"), place / "__init__.py") if each.exists()), None)
