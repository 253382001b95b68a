"""Defines constants of keys and values in 8 bits that all kernels share. Imports nothing, because gateways compute
sizes with them.

A row, which is one token's key or value of one KV head, has codes and a float32 scale: its largest value by size over
the largest code, and at least MIN_SCALE.
"""

from __future__ import annotations

KV_SCALE_BYTES = 4
# For each type of codes, this is the largest value of a code.
MAX_CODES = {"fp8_e4m3": 448.0, "int8": 127.0}
# Every scale is at least this number, which is that of rows of zeros: it is not 0, and its inverse is finite.
MIN_SCALE = 2.0**-100
