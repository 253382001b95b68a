"""The wheel holds every package as pillion.*, and the SDK in it needs nothing of what servers need."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SERVER_ONLY = ("torch", "transformers", "triton", "numpy", "redis", "starlette", "uvicorn", "tokenizers", "safetensors",
               "setproctitle")  # fmt: skip


def test_the_wheel_holds_every_package_under_one_name(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "build"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"pillion"}
    kept = {
        pathlib.Path(folder, name).relative_to(ROOT).as_posix()
        for folder, _, files in os.walk(ROOT / "pillion", followlinks=True)
        for name in files
        if name.endswith((".py", ".pyi", ".lua", ".json", ".typed", ".html", ".css", ".js", ".LICENSE"))
    }
    assert {"pillion/gateway/ui/page/page.html", "pillion/kvstore/index/lua/lookup.lua"} < kept
    assert set(names) == kept


def test_sdk_needs_no_server_package() -> None:
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {SERVER_ONLY!r}:
            raise ImportError("the SDK imports " + name)
sys.meta_path.insert(0, Refuse())
import pillion
import pillion.cli.app
with pillion.Client("127.0.0.1:1") as client:
    try:
        list(client.generate("x", timeout_s=0.2))
    except pillion.PillionError as error:
        print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.stdout.strip() in {"Unavailable", "DeadlineExceeded"}, done.stderr
