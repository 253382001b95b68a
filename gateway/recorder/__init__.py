"""Records requests: `--record-path` keeps a bundle of those that failed, were slow, or were asked for.

    story.py           what happens to one request, and when (no clock, no I/O)
    recorder.py        which requests are recorded; makes their bundles, and writes them on a thread
    record_folder.py   the folder of --record-path: its key, its bounds and ages

What a bundle has, and how it is read, is `pillion/records/bundle.py`.
"""
