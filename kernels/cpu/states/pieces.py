"""Says of which pieces kernels have states. Imports nothing, because engines place pieces without kernels."""

# A piece of the last inputs of a convolution has so many channels, and a piece of a head's matrix so many columns.
PIECE_CHANNELS, PIECE_COLUMNS = 64, 16
# Pieces begin at multiples of so many bytes: at cache lines, which kernels write past the caches.
PIECE_ALIGNMENT_BYTES = 64
# The namespace of blocks whose model has states contains this version of the layout of their pieces (I2).
STATE_LAYOUT_VERSION = "pieces-1"
# The GPU kernels go on in chunks of so many tokens (pillion.kernels.gpu_states.state_places): the fewest rows that
# tensor cores multiply, and the smallest block, so that a state at a block's end has no rows.
CHUNK = 16
