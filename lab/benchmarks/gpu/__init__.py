"""Measures everything on a GPU by one command: ``python -m lab.benchmarks.gpu`` (``make bench-gpu``).

Sections run one after the other, each in a process of its own and within a named time, and every figure stands beside
a limit that was measured in the same process: the device's copy bandwidth, or its rate of matrix products.

- Command: `__main__` runs the sections, `section` is the process of one, `result` writes what they measured.
- Sections: `attention`, `small` (the other kernels), `states` (a layer with a state), `products` (by quantized
  matrices), `grouped` (by experts' matrices), `step` (decode steps), `mixtures` (steps of mixtures of experts),
  `prefill`, `line` (the engine saturated), `ranks` (steps of two ranks), `mps` (two processes on one GPU, each a
  `worker`), `e2e` (the whole cluster; `needs` lists its packages), `peer` (the engine beside transformers, which
  `peer_loop` drives).
- Shared by sections: `bench` (timers and rows), `shapes`, `mixture_shapes` and `model` (random models), `pools` and
  `calls` (kernels on random data).
- Visits: `visit` uses a GPU that is lent for minutes, `visit_parts` lists what it runs, `used_files` finds the files of
  which a part's results are, and `launches` are those of sections, to be compiled ahead.
- Tuner: `tune` is its command, `search` tries candidates, `tunables` lists what can be tuned.

Open `bench` first.
"""
