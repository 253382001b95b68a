"""Recorder: `--record-path` stores a bundle of each request that failed, was slow, or was selected.

    story.py           a request's events, with their times (sans-IO)
    recorder.py        which requests are recorded; creates their bundles, and writes them on a thread
    record_store.py    finds bundles by --record-path
    record_folder.py   a folder of bundles, within limits
    record_redis.py    bundles in the cluster's Redis

The contents of bundles are in `pillion/records/bundle.py`.
"""
