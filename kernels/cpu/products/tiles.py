"""Sizes of tiles of packed matrices. Imports neither torch nor the compiler, because a small process packs adapters."""

from __future__ import annotations

# Outputs of a tile, one per lane of a vector, and of a panel, a pair of tiles.
TILE_COLUMNS = 16
PANEL_COLUMNS = 2 * TILE_COLUMNS
# Bytes of a row's float32 sums for a panel.
TOTALS_BYTES = 4 * PANEL_COLUMNS
# Inputs of a matrix are padded to a multiple of this.
DEPTH_MULTIPLE = 16
