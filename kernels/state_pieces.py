"""Pieces of states. Imports nothing, because engines lay out pieces without kernels."""

# Channels per piece of a convolution's last inputs, and columns per piece of a head's matrix.
PIECE_CHANNELS, PIECE_COLUMNS = 64, 16
# Cache lines, which kernels write with non-temporal stores.
PIECE_ALIGNMENT_BYTES = 64
# Version of the layout of pieces, part of the block namespace of models with states (I2).
STATE_LAYOUT_VERSION = "pieces-1"
# Tokens per chunk of the GPU kernels (pillion.kernels.gpu_states.state_places): the fewest rows that tensor cores
# multiply, and the smallest block, so that a state at a block's end has no rows.
CHUNK = 16
