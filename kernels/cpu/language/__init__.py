"""Defines the language in which the author of a kernel writes it.

    emit.py       Kernel and its values: each call appends LLVM instructions
    byte_codes.py codes of one byte, widened in registers
    module.py     the signature of a kernel, KernelCall, KernelSpec, and a module of kernels
    records.py    records, which pass arguments from Python to a kernel, and the step's record
    sync.py       instructions with which threads and processes wait for one another
    matrix_tiles.py  registers of 16 rows, which one instruction multiplies
    isa.py        the table of instruction sets, and the choice for this processor

Open ``emit.py`` first. Nothing here compiles or runs code; that is ``kernels/cpu/runtime``.
"""
