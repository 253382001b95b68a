"""Makes processes ready ahead of their need (--standby, --fork-server).

    standby.py           a process that is started ahead and takes over when its component dies
    fork_server.py       a process that has imported everything, of which components are forks: the supervisor's side
    fork_server_main.py  its program
    process_title.py     what the process table shows of a fork

No request comes in here.
"""
