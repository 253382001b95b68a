"""Leaves tests of some modes to the long tests, because compiling a kernel takes longer than its tests.

A test module selects them by a function ``left_to_long`` of: whether kernels check their accesses, a test's name, and
its parameters.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests before pytest chooses by marks."""
    for item in items:
        left = getattr(getattr(item, "module", None), "left_to_long", None)
        params = item.callspec.params if left is not None and hasattr(item, "callspec") else {}
        if "runner" in params and left(params["runner"][1], item.originalname, params):
            item.add_marker(pytest.mark.long)
