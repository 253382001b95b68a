"""Pipeline parallelism within a prefill worker: several stages, each with some of the model's layers.

    step k+2 --> stage 0 --rows--> stage 1 --rows--> stage 2
                 step k+2          step k+1          step k       each writes its layers' part of the pool's slots

Processes are managed like ranks (``engine/ranks``), and a stage may be several ranks. Start with ``staged_backend.py``.
"""
