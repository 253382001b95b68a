"""Model caches of tests; pytest loads this module as a plugin."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Iterator

import pytest

from pillion.config import PrepareFlags
from pillion.host.adapter_folders import cache_root

# The compiled kernels of all tests, and of the components that this user runs. Tests name other model caches later.
KERNEL_CACHE = cache_root() / "kernels"


def model_cache(folder: pathlib.Path) -> str:
    """Make a model cache that has nothing but these kernels, for PILLION_CACHE."""
    KERNEL_CACHE.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "kernels").symlink_to(KERNEL_CACHE)
    return str(folder)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """PILLION_CACHE names a folder without models as long as a file's tests run. Fixtures that prepare one need it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILLION_CACHE", model_cache(tmp_path_factory.mktemp("cache") / "models"))
        yield


@pytest.fixture(scope="module")
def prepared_here() -> Iterator[None]:
    """An LLM makes its models ready in this process, which has imported all that it takes, as long as a file's tests
    run: a process for each takes two seconds of a core. tests/pillion/offline/test_offline.py shows that process."""
    # This plugin is loaded for tests that read sources alone, too.
    from pillion.engine.load_model import make_ready
    from pillion.supervisor import local_cluster

    async def prepare_here(flags: PrepareFlags, step: Callable[[str], None]) -> None:
        await asyncio.to_thread(make_ready, flags, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_cluster, "prepare_in_child", prepare_here)
        yield
