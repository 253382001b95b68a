"""Runs components as processes: those of `pillion serve`, and single ones. Open `local_cluster.py` first.

    serve.py                the command: a cluster until a signal
    local_cluster.py        the processes of `pillion serve`, their flags and their order
    gateway_processes.py    several gateways behind the same two ports
    supervisor.py           starts processes level by level, restarts dead ones, stops them all
    standbys/               processes that are started ahead: standbys, and forks of a process with all imports
    restarts.py             when a dead process is restarted
    down_records.py         registers components that are down for a while
    fence_watch.py          kills workers that stay fenced
    child_process.py        one child process: its command line and environment, its output, its end
    lifeline.py             a child dies with its supervisor
    component_process.py    one component in this process, from its flags to its exit status
    embedded_redis.py       the cluster's own Redis
    preflight.py            checks files, ports and folders before anything starts
    start_lines.py          the five lines that a cluster prints at its start
    probes.py               readiness over gRPC
    pool_fit.py             the pool's minimum size
    runtime_dir.py          the directory of sockets

It makes no decisions about requests, and `import pillion` imports nothing of it.
"""
