"""A result: the machine, and rows by section, as JSON and as a Markdown page."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,temperature.gpu"
SMI_TIMEOUT_S = 20.0


def device() -> dict[str, Any]:
    """Describe the GPU and its driver, with current clocks."""
    versions = {}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        **versions,
        **smi(),
    }


def smi() -> dict[str, str]:
    """Return nvidia-smi's fields of the first GPU, {} without one."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(QUERY.split(","), (word.strip() for word in output.split(",")), strict=False))


def place(folder: Path, about: dict[str, Any]) -> Path:
    """Return the JSON file's path, gpu-DEVICE-DATE.json."""
    name = re.sub(r"[^a-z0-9]+", "-", str(about.get("name", "cpu")).lower()).strip("-")
    return folder / f"gpu-{name}-{about['date']}.json"


def merged(path: Path, about: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """Return a result with these sections and the others of an earlier run of the day."""
    before = json.loads(path.read_text("utf-8")) if path.exists() else {"sections": {}}
    return {"device": about, "sections": {**before["sections"], **sections}}


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the JSON, and the page beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", "utf-8")
    path.with_suffix(".md").write_text(page(result), "utf-8")


def page(result: dict[str, Any]) -> str:
    """Return a Markdown page: the machine, and a table for each section."""
    lines = [f"# GPU: {result['device'].get('name', 'none')}, {result['device']['date']}", ""]
    lines += [f"* {name}: {value}" for name, value in sorted(result["device"].items())]
    for name, section in result["sections"].items():
        lines += ["", f"## {name}", "", f"{section['seconds']:.0f} s. {section['error']}".rstrip(), ""]
        lines += table(section["rows"])
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table of rows."""
    return ["| what | figure | share | of | target | met |", "|---|---:|---:|---|---|---|", *map(_line, rows)]


def _line(row: dict[str, Any]) -> str:
    figure = "" if row["value"] is None else f"{row['value']:.4g} {row['unit']}"
    if row["note"]:
        figure = f"{figure}; {row['note']}" if figure else row["note"]
    share = "" if row["share"] is None else f"{row['share']:.2f}"
    met = {True: "yes", False: "no", None: ""}[row["met"]]
    cells = (row["name"], figure, share, row["of"], row["target"], met)
    return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"
