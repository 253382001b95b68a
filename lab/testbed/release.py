"""The last release: its commit, its installation beside this tree, and its protos.

`make release-protos` runs this module to write ``protos/release.binpb``, the descriptors of the last release's protos,
which a test compares with this tree's without git history.
"""

from __future__ import annotations

import io
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
DESCRIPTORS = ROOT / "protos" / "release.binpb"


class Release(NamedTuple):
    """A release: its number, and the full hash of the commit of its wheel."""

    version: str
    commit: str


def last_release() -> Release:
    """Return the newest release in the changelog whose section names its commit, as those of finished releases do."""
    for section in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[2:]:
        if commit := re.search(r"\bcommit\s+`([0-9a-f]{40})`", section):
            return Release(section.split()[0], commit[1])
    raise LookupError("the changelog names no commit of a release")


def take_out(release: Release, folder: pathlib.Path) -> str:
    """Write the release's tree into ``folder``. Return "", or the reason if it is unavailable: a shallow clone or a
    source archive has no history."""
    try:
        command = ["git", "-C", str(ROOT), "archive", "--format=tar", release.commit]
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return "there is no git"
    if done.returncode:
        return f"the history has no commit {release.commit[:12]} of {release.version}: {done.stderr.decode().strip()}"
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tree:
        # Debian 12's Python 3.11.2 has no filters, and Python 3.14 requires one.
        if hasattr(tarfile, "tar_filter"):
            tree.extractall(folder, filter="tar")
        else:
            tree.extractall(folder)
    return ""


def install(release: Release, folder: pathlib.Path) -> str:
    """Build the release's wheel and unpack it into ``folder``, from which components run with the folder as PYTHONPATH
    and this environment's packages for the rest. Return "", or the reason if the tree is unavailable."""
    with tempfile.TemporaryDirectory() as place:
        tree, wheels = pathlib.Path(place, "tree"), pathlib.Path(place, "wheels")
        if missing := take_out(release, tree):
            return missing
        words = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(tree)]
        subprocess.run([sys.executable, "-m", "pip", "wheel", *words], check=True, capture_output=True)
        (wheel,) = wheels.iterdir()
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    return ""


def descriptors(protos: pathlib.Path) -> bytes:
    """Return the serialized FileDescriptorSet of all ``.proto`` files under ``protos``, without comments.

    protoc runs as a process: with NIXL's libraries loaded it would abort this one, since both have protobuf's symbols.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "set.binpb")
        sources = sorted(str(path) for path in protos.rglob("*.proto"))
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}", f"--descriptor_set_out={out}", *sources]
        if subprocess.run(command).returncode != 0:
            raise SystemExit("protoc failed")
        return out.read_bytes()


def main() -> None:
    release = last_release()
    with tempfile.TemporaryDirectory() as folder:
        if missing := take_out(release, pathlib.Path(folder)):
            raise SystemExit(missing)
        DESCRIPTORS.write_bytes(descriptors(pathlib.Path(folder, "protos")))
    print(f"{DESCRIPTORS.relative_to(ROOT)}: the protos of {release.version}, commit {release.commit}")


if __name__ == "__main__":
    main()
