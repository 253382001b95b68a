"""Measures Pillion. Each figure stands beside a peer or a physical limit that was measured in the same run.

Each module is a program, `python -m lab.benchmarks.NAME`, which prints a table and writes `results/NAME.json`. What is
claimed of a result stands in lab/docs/measurements.md; a benchmark whose figure has left that page is deleted.

- Clusters: `cluster` (against transformers), `capacity` and `capacity_sim` (requests a second within an objective,
  measured and in simulated time), `fairness`
  (tenants), `upgrade` (workers that are replaced under load), `deadlines` (what is refused early), `second_turns`
  (chats beside a peer), `budget` and `chunks` (the step's token budget), `split_sim`, `split_fit` and `split_load`
  (the split policies in simulated time, the costs of their steps, and their load), `simulation_error` (the simulated
  fleet beside real clusters), `autoscaling` (a fleet that grows and shrinks, simulated), `herding` (several gateways
  in the simulation), `registry` (a large cluster at a gateway), `tracing` and `recording` (what traces and
  bundles cost), `lora_service` (the cost of adapters), `edge` and `edge_processes` (the gateway alone), `long_context`
  (one prompt of 128K tokens).
- Engine: `decode_loop` (the phases of a decode step), `cpu_steps`, `cpu_profile`, `cpu_products`, `cpu_states` and
  `cpu_attention` (the CPU kernels), `gpt_oss` (a step of its shape beside a streaming read), `cpu_limits` (what a
  processor can do at most), `lora` (adapters in the CPU kernels), `ranks` and `stages` (tensor and pipeline
  parallelism on one host), `structured` and `wide_vocabulary` (answers of a given shape), `quantization` (the
  accuracy of int8 and int4, on `shuffled_model`), `drafts` and `eagle_head` (draft tokens, and a head that is
  trained for it), `kernel_share` (a service beside its kernels alone, and where the rest goes), `cpu_service`,
  `cold_prompts`, `peers`, `llama_stream` and `closed_loop` (other servers beside Pillion), `pooling` (vectors beside
  streams), `gpu` (everything that needs a GPU).
- KV store: `kvstore` runs `kv_node`, `kv_handoff`, `kv_index`, `kv_plane` and `kv_fetch` (a prefix from one node to
  another), `links` (whether `auto` fetches a prefix over a network or computes it); `tiers` (times to the first token
  by where a prompt's KV is); `partial_blocks` (what chats compute again);
  `state_hits` and `state_fleets` (hits of models with states); `read_ahead` (second turns whose histories are on
  disk).
- Stability: `load_test` (a bounded load that must not fail), `soak` (a long load under which nothing may grow),
  `warm_restart` (how long a killed component takes until it is ready), `pauses` (what clients see of killed and
  stopped components), `replays` (recorded requests of every kind, again at another cluster), `canaries` (what a canary
  tells of the next version, and what it costs streams).
- Shared code: `report` (results and the machine), `plot` (charts), `traces` and `mooncake` (made request traces),
  `accuracy` (how well weights predict a text).

Those that take seconds at their smallest size run so in `make test-long`
(tests/lab/benchmarks/test_every_benchmark.py). Open `report` first. Modules here import `pillion`, `lab.testbed` and
`lab.fleets`, never `tests`.
"""
