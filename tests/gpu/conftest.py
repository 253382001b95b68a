"""A machine that has a GPU need not have what the servers import: there the tests of whole clusters are left out."""

from __future__ import annotations

from benchmarks.gpu.needs import missing_packages

MISSING = missing_packages()
collect_ignore = ["test_cluster.py"] if MISSING else []


def pytest_report_header() -> str:
    """Said at the beginning of every run, so that nobody takes it for all of them."""
    return f"test_cluster.py is left out: it needs {', '.join(MISSING)}" if MISSING else ""
