"""Constants of 8-bit keys and values that all kernels share. Imports nothing, because gateways compute sizes with them.

A row, one token's key or value of one KV head, is stored as 8-bit codes and a float32 scale: its largest magnitude
divided by the largest code value, at least MIN_SCALE.
"""

from __future__ import annotations

KV_SCALE_BYTES = 4
# Largest value of a code, by type.
MAX_CODES = {"fp8_e4m3": 448.0, "int8": 127.0}
# Lower bound of scales: rows of zeros need a scale with a finite inverse.
MIN_SCALE = 2.0**-100
