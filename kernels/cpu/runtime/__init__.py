"""Map of the kernels' runtime: from kernel specs to running machine code.

    compiler.py            compiles specs through LLVM, or loads their code from the cache
    code_cache.py          machine code on disk
    program.py             a step's program: buffers, records and the table of kernels; the check of a batch
    thread_pool.py         ThreadPool: native threads that run a program
    thread_pool_code.py    the threads' machine code: how they divide a program, and how they wait

Open ``program.py`` first. No kernel of a model is defined here.
"""
