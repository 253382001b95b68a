"""The laboratory: what measures and tries the product from outside. Nothing here is in the wheel, and nothing in
`pillion` imports it.

    testbed/     servers, clusters and models that tests and benchmarks share. Open it first
    benchmarks/  programs that measure, and their results
    simulator/   whole components on a simulated clock, with faults that a seed draws
    fleets/      fleets of any size on a simulated clock under a trace's load: `python -m lab.fleets`
    demo.py      a cluster of the product's, a few questions and a table: `make demo`
    blocking_client.py  writes the SDK's blocking client from its asyncio one: `make client`
    gpu_builds/  builds the kernels of GPUs without a GPU, within limits of registers and spills
    docs/        where ideas came from, what was measured before, and what is used of libraries inside
"""
