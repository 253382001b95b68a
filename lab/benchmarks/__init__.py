"""Programs that measure Pillion, each figure beside a peer or a physical limit of the same run.

`python -m lab.benchmarks.NAME` prints a table and writes `results/NAME.json`. Claims are in lab/docs/measurements.md; a
benchmark without a figure there is deleted.

- Beside other servers: `cpu_service` (closed loops), `capacity` (requests per second within an objective),
  `capacity_sim` (the same in simulated time), `cold_prompts` (time to first token), `kernel_share` (a service beside
  its kernels alone). `peers`, `llama_stream` and `closed_loop` run the other servers and the load.
- Kernels: `cpu_products` and `cpu_attention` beside the `cpu_limits` of a processor, on models of `cpu_steps`; `drafts`
  (draft tokens); `quantization` (accuracy, by `accuracy`, also on a `shuffled_model`); `gpu` (all that needs a GPU).
- KV store: `tiers` (time to first token by where a prompt's KV is).
- Faults: `pauses` (gaps in streams when components die), `warm_restart` (time to ready after a kill), `replays`
  (recorded requests, replayed on another cluster).
- Stability: `load_test` (a bounded load that must not fail), `soak` (a long load under which nothing may grow).
- Shared: `report` (results and the machine), `plot` (charts), `traces` and `mooncake` (generated request traces).

Open `report` first. Modules import `pillion`, `lab.testbed` and `lab.fleets`, never `tests`.
"""
