"""Gives NumPy's BLAS one thread in this process and in those that tests start. Import this before NumPy.

It starts its threads when it is imported, and nothing can be forked beside threads (tests/support/forked_processes.py).
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
