"""The pieces that kernels cut states into. Imports nothing: engines place pieces without kernels."""

# Channels per piece of a convolution's last inputs, and columns per piece of a head's matrix.
PIECE_CHANNELS, PIECE_COLUMNS = 64, 16
# A cache line: kernels write pieces past the caches.
PIECE_ALIGNMENT_BYTES = 64
# The namespace of blocks whose model has states contains this version of the layout of their pieces (I2).
STATE_LAYOUT_VERSION = "pieces-1"
# The GPU kernels go on in chunks of so many tokens (pillion.kernels.gpu_states.state_places): the fewest rows that
# tensor cores multiply, and the smallest block, so that a state at a block's end has no rows.
CHUNK = 16
