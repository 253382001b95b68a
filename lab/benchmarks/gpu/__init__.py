"""All GPU measurements by one command: ``python -m lab.benchmarks.gpu`` (``make bench-gpu``).

Sections run one by one, each in a process with a timeout, and each figure is beside a limit measured in the same
process: the device's copy bandwidth, or its rate of matrix products.

- Command: `__main__` runs the sections, `section` is the process of one, `result` writes the results.
- Sections: `attention`, `small` (the other kernels), `states` (a layer with a state), `products` (by quantized
  matrices), `grouped` (by experts' matrices), `step` (decode steps), `mixtures` (steps of mixtures of experts),
  `prefill`, `line` (the saturated engine), `e2e` (the whole cluster; `needs` lists its packages).
- Shared by sections: `bench` (timers and rows), `shapes`, `mixture_shapes` and `model` (random models), `pools` and
  `calls` (kernels on random data).
- Visits: `visit` uses a GPU for some minutes, `visit_parts` lists its parts, `used_files` finds the files that a part's
  results depend on, and `launches` lists the launches of sections, to compile them ahead.
- Tuner: `tune` is its command, `search` tries candidates, `tunables` lists the tunable kernels.

Open `bench` first.
"""
