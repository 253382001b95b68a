"""Each name of production code or the standard library that a simulated world patches exists and is used."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pillion
from lab.simulator import seams

ROOT = Path(pillion.__file__).parent
PAGE = "lab/docs/library-internals.md"


def replaced() -> list[tuple[str, str]]:
    """Return what seams.py replaces: expressions of the owners, and names."""
    pairs = [node for node in ast.walk(ast.parse(inspect.getsource(seams))) if isinstance(node, ast.Tuple)]
    return [
        (ast.unparse(place), name.value)
        for place, name, *_ in (pair.elts for pair in pairs if len(pair.elts) == 3)
        if isinstance(name, ast.Constant) and isinstance(name.value, str)
    ]


def place_of(expression: str) -> Any:
    module, _, name = expression.partition(".")
    found = getattr(seams, module)
    return getattr(found, name) if name else found


@functools.cache
def product() -> list[tuple[Path, str]]:
    """Return the sources of production code."""
    folders = ("engine", "gateway", "kernels", "kvstore", "decode_service", "prefill_service")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths += [path for path in ROOT.rglob("*.py") if "v1" not in path.parts]
    own = {path.resolve() for path in paths if "simulator" not in path.resolve().parts}
    return [(path, path.read_text()) for path in sorted(own)]


@functools.cache
def attributes_in(text: str) -> set[str]:
    return {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}


def is_attribute(name: str) -> bool:
    """Return whether production code reads an attribute of this name, parsing only files that may."""
    return any(f".{name}" in text and name in attributes_in(text) for _, text in product())


@functools.cache
def names_of(module: ModuleType) -> set[str]:
    """Return the names that a module reads or defines."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    loaded |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return loaded | {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize(("place", "name"), replaced(), ids=lambda part: part)
def test_replaced_names_exist_and_are_used(place: str, name: str) -> None:
    found = place_of(place)
    why = f"the simulation replaces {place}.{name}: see {PAGE}"
    assert hasattr(found, name), f"{why}. It is gone."
    if isinstance(found, ModuleType) and found.__name__.startswith("pillion."):
        assert name in names_of(found), f"{why}. That module does not use it any more."
    else:
        assert is_attribute(name), f"{why}. Nobody uses it any more."


def test_clocks_and_randomness_are_read_through_their_modules() -> None:
    """A name imported from one of these modules would remain the machine's own in a simulated world."""
    owned = {(place, name) for place, name in replaced() if place in ("time", "secrets", "random")}
    imported = [
        f"{path}: from {node.module} import {alias.name}"
        for path, text in product()
        if any(f"from {place} " in text for place, _ in owned)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in owned
    ]
    assert imported == [], f"see {PAGE}"
