"""Where a machine keeps its copies of adapters: by their digests, in the model cache that all components share.

$PILLION_CACHE or ~/.cache/pillion
`-- adapters/<digest>/    the ADAPTER_FILES, whole and never changed
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ADAPTERS = "adapters"

_DIGEST = re.compile(r"[0-9a-f]{64}")


def cache_root() -> Path:
    """The model cache's folder, which may not exist yet."""
    return Path(os.environ.get("PILLION_CACHE") or "~/.cache/pillion").expanduser()


def is_adapter_digest(text: str) -> bool:
    """Whether ``text`` may name an adapter: a SHA-256 in hexadecimal."""
    return _DIGEST.fullmatch(text) is not None
