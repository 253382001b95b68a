"""A plugin of pytest for the runs of mutants: quick tests go first, and hypothesis does not shrink what it finds."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from mutmut.state import state


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    settings.register_profile(
        "mutants",
        settings.get_profile("loaded"),
        phases=(Phase.explicit, Phase.generate),
        database=None,
        report_multiple_bugs=False,
    )
    settings.load_profile("mutants")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    durations = state().duration_by_test
    items.sort(key=lambda item: durations.get(item.nodeid, 0.0))
