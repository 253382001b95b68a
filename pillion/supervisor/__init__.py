"""Runs components as processes: `pillion serve`, `pillion demo`, each component alone. Open `local_cluster.py` first.

    serve.py, demo.py       the commands: a cluster until a signal, or for three questions
    local_cluster.py        which processes `pillion serve` starts, with which flags, in which order
    gateway_processes.py    several gateways behind the same two ports
    supervisor.py           starts processes level by level, restarts dead ones, stops them all
    standby.py              a process that is started ahead and takes over when its component dies
    restarts.py             when a dead process is started again
    down_records.py         tells the registry which components are down for a while
    fence_watch.py          kills workers that stay fenced
    fork_server.py          a process that has imported everything, of which components are forks: the supervisor's side
    fork_server_main.py     its program
    process_title.py        what the process table shows of a fork
    child_process.py        one child process: its command line and environment, its output, its end
    lifeline.py             a child dies with its supervisor
    component_process.py    one component in this process, from its flags to its exit status
    embedded_redis.py       the cluster's own Redis
    preflight.py            looks at files, ports and folders before anything starts
    start_lines.py          the five lines with which a cluster starts
    probes.py, pool_fit.py, runtime_dir.py      readiness over gRPC, the pool's least size, the directory of sockets

Decisions about requests never come in here, and nothing in here is imported by `import pillion`.
"""
