"""Defines the sizes of tiles. Imports neither torch nor the compiler, because a small process packs adapters with these
sizes too.
"""

from __future__ import annotations

# A tile has this many outputs, one for each lane of a vector, and a panel, which is a pair of tiles, twice as many.
TILE_COLUMNS = 16
PANEL_COLUMNS = 2 * TILE_COLUMNS
# A panel's sums of one row take this many bytes.
TOTALS_BYTES = 4 * PANEL_COLUMNS
# Inputs of a matrix are padded to a multiple of this number.
DEPTH_MULTIPLE = 16
