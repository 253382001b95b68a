"""Triton's own functions are compiled or interpreted as the environment says when Triton is first imported, and
transformers imports it: so where kernels run is decided before any test module is read.
"""

from __future__ import annotations

import tests.support.gpu  # noqa: F401
