"""Sizes of tiles. Imports neither torch nor the compiler, because a small process packs adapters with these sizes."""

from __future__ import annotations

# Outputs of a tile, one per lane of a vector, and of a panel, a pair of tiles.
TILE_COLUMNS = 16
PANEL_COLUMNS = 2 * TILE_COLUMNS
TOTALS_BYTES = 4 * PANEL_COLUMNS
# Inputs of a matrix are padded to a multiple of this.
DEPTH_MULTIPLE = 16
