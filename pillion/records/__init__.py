"""Holds bundles: what a gateway with --record-path keeps of a request, and what reads it.

    bundle.py           the format and its key; open this first
    explanation.py      a bundle's story as a picture of time and sentences
    comparison.py       where the answers of a bundle and of its replay differ
    replay.py           a bundle's request once more; replay_client.py sends it
    canary.py           what a canary decides by; canary_run.py follows the folder

The gateway's side, which collects a request's story and keeps its bundle, is `gateway/recorder`. The commands are
`pillion/cli/explain_command.py` and `pillion/cli/replay_commands.py`.
"""
