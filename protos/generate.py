"""Write the Python stubs of protos/ into pillion/v1. Run it after editing a .proto: `make protos`.

The stubs are committed, so that a clone runs without a compiler; a test regenerates them and compares.
"""

from __future__ import annotations

import os
import pathlib
import sys

from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent


def generate(out: pathlib.Path) -> None:
    """Generates message and service stubs, with their type stubs, under ``out``/pillion/v1."""
    # protoc finds the plug-ins that write type stubs on the PATH; they stand beside this Python.
    os.environ["PATH"] = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")))
    sources = sorted(str(path) for path in (ROOT / "protos").rglob("*.proto"))
    kinds = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")
    args = ["protoc", f"-I{ROOT / 'protos'}", *(f"--{kind}={out}" for kind in kinds), *sources]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
