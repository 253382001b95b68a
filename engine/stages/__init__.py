"""Runs pipeline parallelism inside of a prefill worker: several stages, each with some of the model's layers.

    step k+2 --> stage 0 --rows--> stage 1 --rows--> stage 2
                 step k+2          step k+1          step k       each writes its layers' part of the pool's slots

Processes are those of ranks (``engine/ranks``): they are started, called, watched and ended alike, and a stage may be
several ranks. Open ``staged_backend.py`` first.
"""
