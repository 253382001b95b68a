"""Makes running machine code of kernel specs.

    compiler.py            compiles specs through LLVM, or loads their code from the cache
    code_cache.py          machine code on disk
    program.py             a step's program: buffers, records and the table of kernels; the check of a batch
    thread_pool.py         ThreadPool: native threads that run a program
    thread_pool_code.py    the threads' machine code: how they divide a program, and how they wait
    thread_pool.pml        its model for spin, which follows it word by word (docs/thread-pool.md)

Open ``program.py`` first. No kernel of a model is defined here.
"""
