"""Runs components as processes: `pillion serve`, each component alone. Open `local_cluster.py` first.

    serve.py                the command: a cluster until a signal
    local_cluster.py        which processes `pillion serve` starts, with which flags, in which order
    gateway_processes.py    several gateways behind the same two ports
    supervisor.py           starts processes level by level, restarts dead ones, stops them all
    standbys/               such processes: standbys, and forks of one that has imported everything
    restarts.py             when a dead process is started again
    down_records.py         tells the registry which components are down for a while
    fence_watch.py          kills workers that stay fenced
    child_process.py        one child process: its command line and environment, its output, its end
    lifeline.py             a child dies with its supervisor
    component_process.py    one component in this process, from its flags to its exit status
    embedded_redis.py       the cluster's own Redis
    preflight.py            looks at files, ports and folders before anything starts
    start_lines.py          the five lines with which a cluster starts
    probes.py               readiness over gRPC
    pool_fit.py             the pool's least size
    runtime_dir.py          the directory of sockets

Decisions about requests never come in here, and nothing in here is imported by `import pillion`.
"""
