"""Measurements of Pillion, each beside a peer or a physical limit that was measured in the same run.

Each module is a program, `python -m benchmarks.NAME`, which prints a table and writes `results/NAME.json`.

- Clusters: `cluster` (against transformers), `budget` (the decode step's token budget), `split` (the split policies),
  `split_sim`, `split_fit` and `split_load` (their simulation and its load), `simulation_error` (the simulated fleet
  beside real clusters), `autoscaling` (a fleet that grows and shrinks, simulated), `herding` (several gateways in the
  simulation), `registry` (a large cluster at a gateway), `tracing` (the cost of traces), `lora_service` (the cost of
  adapters), `edge` and `edge_processes` (the gateway alone).
- Engine: `step` (phases of a decode step), `memory` (peak memory by prompt length), `cpu`, `cpu_steps`, `cpu_profile`,
  `cpu_products`, `cpu_attention` and `cpu_life` (the CPU kernels), `cpu_limits` (what a processor can do at most),
  `lora` (adapters in the CPU kernels), `ranks` (tensor parallelism on one host), `structured` and `wide_vocabulary`
  (answers of a given shape), `quantization` (the accuracy of int8 and int4, on `shuffled_model`), `drafts` and
  `eagle_head` (guessed tokens, and a head that is trained for it), `cpu_service`, `peers`, `llama_stream` and
  `closed_loop` (other servers beside Pillion), `gpu` (everything that needs a GPU).
- KV store: `kvstore` runs `kv_node`, `kv_handoff`, `kv_index`, `kv_plane`, `kv_disk` and `kv_eviction`; `kv_fetch` (a
  prefix from one node to another), `tiers` (times to the first token by where a prompt's KV is).
- Stability: `load_test` (a bounded load that must not fail), `soak` (a long load under which nothing may grow),
  `warm_restart` (how long a killed component takes until it is ready) and
  `pauses` (what clients see of killed and stopped components).
- Shared code: `report` (results and the machine), `plot` (charts), `traces` and
  `mooncake` (made request traces).

Open `report` first. Modules here import `pillion` and `testbed`, never `tests`.
"""
