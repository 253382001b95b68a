"""`pillion top` shows a live view of a running cluster. Open `top.py` first.

    command.py        the command's options
    top.py            asks the gateway and the metrics pages again and again, and prints frames
    top_pages.py      where metrics pages are, and what their text means
    top_figures.py    rates, shares and quantiles between two readings
    top_view.py       a frame as a pure function of two readings

Nothing in here changes the cluster, and nothing in here is imported by `import pillion`.
"""
