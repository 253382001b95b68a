"""Makes torch report a processor with AVX2 only, if PYTHONPATH begins with this folder.

vLLM chooses its kernels by these functions, which no environment variable changes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULE = "torch.cpu"
HIDDEN = ("avx512", "avx512_bf16", "vnni", "amx_tile", "amx_fp16")


class HidingFinder(importlib.abc.MetaPathFinder):
    """Import finder that replaces MODULE's functions after Python has run it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_hide(module: Any) -> None:
            run(module)
            for feature in HIDDEN:
                function = f"_is_{feature}_supported"
                assert hasattr(module, function), f"{MODULE} has no {function} any more"
                setattr(module, function, lambda: False)

        loader.exec_module = run_and_hide
        return spec


sys.meta_path.insert(0, HidingFinder())
