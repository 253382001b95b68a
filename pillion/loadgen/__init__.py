"""`pillion bench`: load on a running service, and what its clients see. Works with the SDK alone.

    load.py    config, seed -> sessions with arrival times        arrivals, lengths, traces: what they are drawn from
       |
    drive.py   sends each at its time, whatever the server does   target (gRPC), http (OpenAI): who is asked
       |
    records    figures.py: percentiles   slo.py: goodput          sweep.py: the next rate to try
       |
    report.py  JSON, table               plots.py: pictures

Everything but drive, target, http and the writing of files is sans-IO, and follows from the config alone.
"""
