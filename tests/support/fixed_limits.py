"""Splits a test's settings of a component into its flags and fixed limits."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def split_limits(kind: type[T], options: dict[str, Any]) -> tuple[dict[str, Any], T]:
    """Return the flags among ``options``, and the limits of ``kind`` with the others."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    flags = {name: value for name, value in options.items() if name not in names}
    return flags, kind(**{name: value for name, value in options.items() if name in names})
