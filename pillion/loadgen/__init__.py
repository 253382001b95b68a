"""`pillion bench`: puts load on a running service and measures what its clients see. Depends on the SDK alone.

    load.py    config, seed -> sessions with arrival times        traces.py: recorded traffic
       |
    drive.py   sends each at its time, however slow the server    target (gRPC), openai_target (HTTP): what is driven
       |
    records    figures.py: percentiles   slo.py: objectives       sweep.py: the next rate to try
       |
    report.py  JSON, table               run.py: one run or a sweep, from target to result

Open `run` first. All modules but drive, run, the targets and the writing of files are sans-IO and deterministic in the
config. Nothing here imports a server.
"""
