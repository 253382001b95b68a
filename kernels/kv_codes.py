"""What all kernels agree on where keys and values have 8 bits. Imports nothing, because gateways compute sizes with it.

A row, which is one token's key or value of one KV head, has codes and a float32 scale: its largest value by size over
the largest code, and at least MIN_SCALE.
"""

from __future__ import annotations

KV_SCALE_BYTES = 4
# The largest value of a code, by the type of codes.
MAX_CODES = {"fp8_e4m3": 448.0, "int8": 127.0}
# The least scale, of rows of zeros: it is not 0, and its inverse is finite.
MIN_SCALE = 2.0**-100
