"""Defines the language in which the author of a kernel writes it.

Open ``emit.py`` first. Nothing here compiles or runs code; that is ``kernels/cpu/runtime``.
"""
