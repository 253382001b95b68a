"""The table of features: ``python -m docs.features`` (or ``make dashboards``) writes features.md from features.toml."""

from __future__ import annotations

import ast
import pathlib
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import msgspec

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent
PAGE = FOLDER / "features.md"
BEGIN, END = "<!-- features: written by docs/features.py -->\n", "<!-- end of features -->\n"
# What the wheel contains.
PRODUCT = ("pillion", "gateway", "engine", "kernels", "kvstore", "decode_service", "prefill_service")
# Pages that put a component together. Each imports the features that its flags can turn on.
ASSEMBLE_PAGES = (
    "decode_service/assemble.py",
    "engine/assemble_worker.py",
    "engine/load_model.py",
    "gateway/assemble.py",
    "kvstore/assemble.py",
    "pillion/cli/app.py",
    "pillion/supervisor/local_cluster.py",
    "prefill_service/assemble.py",
)


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of features.toml. ``purpose``, ``measured`` and ``never_run`` are Markdown."""

    name: str
    purpose: str
    where: tuple[str, ...]
    measured: str
    never_run: str
    tests: tuple[str, ...] = ()

    @property
    def test_places(self) -> tuple[str, ...]:
        """Files and folders of its tests."""
        return (*self.tests, *(f"tests/{place}" for place in self.where))


@cache
def features() -> tuple[Feature, ...]:
    """Read features.toml."""
    rows = tomllib.loads((FOLDER / "features.toml").read_text())["feature"]
    return tuple(msgspec.convert(rows, list[Feature]))


def feature_of(file: str) -> str | None:
    """Return the name of the feature that a file of the product or a test belongs to; None for the core."""
    found, longest = None, -1
    for feature in features():
        for place in (*feature.where, *feature.test_places):
            if len(place) > longest and (file == place or file.startswith(f"{place}/")):
                found, longest = feature.name, len(place)
    return found


def product_files() -> list[str]:
    """Return the product's Python files, without generated stubs."""
    files = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))
    names = sorted(path.relative_to(ROOT).as_posix() for path in files)
    return [name for name in names if not name.startswith("pillion/v1/")]


def module_name(file: str) -> str:
    """Return the dotted name that a file of the product is imported by."""
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "pillion" else ["pillion", *parts])


def imported_modules(source: str) -> set[str]:
    """Return what a module imports anywhere in it: modules, and ``module.name`` for each imported name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found


@cache
def importers() -> dict[str, tuple[str, ...]]:
    """Return the files of the product outside each feature that import it, by the feature's name."""
    files = product_files()
    by_module = {module_name(file): feature_of(file) for file in files}
    found: dict[str, list[str]] = defaultdict(list)
    for file in files:
        modules = imported_modules((ROOT / file).read_text())
        for name in {by_module.get(module) for module in modules} - {None, feature_of(file)}:
            found[str(name)].append(file)
    return {name: tuple(sorted(where)) for name, where in found.items()}


def callers() -> dict[str, tuple[str, ...]]:
    """Return the core files that import each feature, by the feature's name."""
    core = {name: tuple(file for file in where if feature_of(file) is None) for name, where in importers().items()}
    return {name: where for name, where in core.items() if where}


def dependents(name: str) -> list[str]:
    """Return the names of the features that import the feature ``name``."""
    return sorted({str(feature_of(file)) for file in importers().get(name, ())} - {"None"})


def calling_files() -> set[str]:
    """Return the core files outside ASSEMBLE_PAGES that import a feature."""
    return {file for where in callers().values() for file in where} - set(ASSEMBLE_PAGES)


def table() -> str:
    """Return the table of features as Markdown."""

    def cell(files: Sequence[str]) -> str:
        return ", ".join(f"`{file}`" for file in files)

    rows = [
        "| feature | purpose | where | called by | needed by | measured | never run |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in features():
        calls, needed = cell(callers().get(one.name, ())), ", ".join(dependents(one.name))
        places = f"{cell(one.where)} | {calls} | {needed}"
        rows.append(f"| {one.name} | {one.purpose} | {places} | {one.measured} | {one.never_run} |")
    return "\n".join(rows) + "\n"


def render(text: str) -> str:
    """Return the page ``text`` with its table rewritten between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
