"""Leaves to the long tests what a test module says of its modes, because a kernel's tests take less than its compiling.

Such a module has a function ``left_to_long``, which is told whether kernels check what they touch, a test's name and
its parameters.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests before pytest chooses by marks."""
    for item in items:
        left = getattr(getattr(item, "module", None), "left_to_long", None)
        params = item.callspec.params if left is not None and hasattr(item, "callspec") else {}
        if "runner" in params and left(params["runner"][1], item.originalname, params):
            item.add_marker(pytest.mark.long)
