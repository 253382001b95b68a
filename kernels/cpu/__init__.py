"""The CPU kernels: the whole forward pass as machine code that this package writes through LLVM, without a compiler on
the user's machine. docs/cpu.md draws the layouts and says how a step runs."""
