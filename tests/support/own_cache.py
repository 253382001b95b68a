"""Model caches of tests; a pytest plugin."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable, Iterator

import pytest

from pillion.config import PrepareFlags
from pillion.host.adapter_folders import cache_root

# Compiled kernels of all tests, and of components that this user runs. Tests use other model caches later.
KERNEL_CACHE = cache_root() / "kernels"


def model_cache(folder: pathlib.Path) -> str:
    """Create a model cache that contains only these kernels, for PILLION_CACHE."""
    KERNEL_CACHE.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / "kernels").symlink_to(KERNEL_CACHE)
    return str(folder)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set PILLION_CACHE to a folder without models for each test file, as needed by fixtures that prepare one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILLION_CACHE", model_cache(tmp_path_factory.mktemp("cache") / "models"))
        yield


@pytest.fixture(scope="module")
def prepared_here() -> Iterator[None]:
    """Prepare models of LLM in this process, which has the imports, for each test file: a process each would cost two
    seconds. tests/pillion/offline/test_offline.py tests that process."""
    # Imported lazily: this plugin is also loaded for tests that only read sources.
    from pillion.engine.load_model import make_ready
    from pillion.supervisor import local_cluster

    async def prepare_here(flags: PrepareFlags, step: Callable[[str], None]) -> None:
        await asyncio.to_thread(make_ready, flags, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_cluster, "prepare_in_child", prepare_here)
        yield
