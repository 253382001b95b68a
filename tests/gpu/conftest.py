"""Leaves out tests of whole clusters on machines with a GPU but without the packages that servers import."""

from __future__ import annotations

from benchmarks.gpu.needs import missing_packages

MISSING = missing_packages()
collect_ignore = ["test_cluster.py"] if MISSING else []


def pytest_report_header() -> str:
    """Reports at the beginning of a run that tests are left out."""
    return f"test_cluster.py is left out: it needs {', '.join(MISSING)}" if MISSING else ""
