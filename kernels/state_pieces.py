"""Sizes of the pieces that recurrent states are stored in. Imports nothing, because engines plan states without
kernels."""

# Channels per piece of a convolution's last inputs, and columns per piece of a head's matrix.
PIECE_CHANNELS, PIECE_COLUMNS = 64, 16
# Pieces begin at cache lines, because kernels write them with non-temporal stores.
PIECE_ALIGNMENT_BYTES = 64
# Version of the layout of pieces, part of the block namespace of models with states (I2).
STATE_LAYOUT_VERSION = "pieces-1"
# Tokens per chunk of the GPU kernels (pillion.kernels.gpu_states.state_places): the smallest tensor-core tile, and the
# smallest block size, so that a state at a block boundary contains no rows of an unfinished chunk.
CHUNK = 16
