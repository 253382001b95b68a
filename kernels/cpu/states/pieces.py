"""Says of which pieces the CPU kernels have states. Imports nothing, because engines place pieces without kernels."""

# A piece of the last inputs of a convolution has so many channels, and a piece of a head's matrix so many columns.
PIECE_CHANNELS, PIECE_COLUMNS = 64, 16
# Pieces begin at multiples of so many bytes: at cache lines, which kernels write past the caches.
PIECE_ALIGNMENT_BYTES = 64
# The namespace of blocks whose model has states contains this version of the layout of their pieces (I2).
STATE_LAYOUT_VERSION = "pieces-1"
