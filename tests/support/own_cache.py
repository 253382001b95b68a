"""A model cache for the tests of one file; pytest loads this module as a plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """PILLION_CACHE names an empty folder for as long as a file's tests run. Fixtures that prepare a model need it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILLION_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
