"""Runs pipeline parallelism inside of a prefill worker: several stages, each with some of the model's layers.

    stage_loading.py   what the core asks for: refuses, starts and loads the processes of all stages
    stage_shares.py    which layers a stage has, and which process is which stage and rank
    stage_rows.py      the rows that pass from stage to stage: memory with a slot for each step under way, and a socket
    cpu_stage.py       a stage on the CPU kernels: its forward pass begins and ends with these rows
    stage_clock.py     when each stage computed and when it waited: the bubbles
    staged_backend.py  the first stage's backend, which launches each step in all stages
    stage_main.py      the process of any other stage

    step k+2 --> stage 0 --rows--> stage 1 --rows--> stage 2
                 step k+2          step k+1          step k       each writes its layers' part of the pool's slots

Processes are those of ranks (``engine/ranks``): they are started, called, watched and ended alike, and a stage may be
several ranks. Open ``staged_backend.py`` first.
"""
