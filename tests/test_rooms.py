"""The table of what features enter at seams, and the page of features, name what is there."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest

from pillion.rooms import PLACES

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("place", [place for places in PLACES.values() for place in places])
def test_every_place_of_the_table_is_there(place: str) -> None:
    module, _, attribute = place.partition(":")
    assert hasattr(importlib.import_module(module), attribute)


def test_the_page_of_features_names_folders_that_are_there() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs" / "features.md").read_text().splitlines() if "`" in line]
    named = [place for row in rows for place in re.findall(r"`([^`]+)`", row[2])]
    assert named
    assert [place for place in named if not (ROOT / place).exists()] == []
