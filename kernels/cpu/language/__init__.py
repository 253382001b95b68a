"""The language in which kernels are written.

Open ``emit.py`` first. Nothing here compiles or runs code; that is ``kernels/cpu/runtime``.

README.md has types, control flow, an example and the invariants.
"""
