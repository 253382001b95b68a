"""Tests, benchmarks and simulations of the product; not in the wheel, and never imported by `pillion`.

testbed/     servers, clusters and models shared by tests and benchmarks. Open it first
benchmarks/  performance measurements and their results
simulator/   whole components on a simulated clock, with faults drawn from a seed
fleets/      fleets of any size in simulated time under a trace: `python -m lab.fleets`
demo.py      a cluster, a few questions and a table: `make demo`
blocking_client.py  generator of the SDK's blocking client: `make client`
gpu_builds/  GPU kernels compiled without a GPU, within limits on registers and spills
docs/        measurements, sources of ideas, internals of libraries
"""
