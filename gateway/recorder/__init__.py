"""Records requests: `--record-path` keeps a bundle of those that failed, were slow, or were asked for.

    story.py           what happens to one request, and when (no clock, no I/O)
    recorder.py        which requests are recorded; makes their bundles, and writes them on a thread
    record_store.py    finds bundles by --record-path
    record_folder.py   a folder of bundles, within bounds
    record_redis.py    bundles in the Redis of the cluster

What a bundle has is in `pillion/records/bundle.py`.
"""
