"""Bundles: what a gateway with --record-path records of a request, and the commands that read it.

    bundle.py           the format and its key; open this first
    explanation.py      a bundle's story as a timeline and as sentences
    comparison.py       where the answers of a bundle and of its replay differ
    replay.py           sends a bundle's request again; replay_client.py is its client
    canary.py           the canary's rule and figures; canary_run.py follows the folder

The gateway's side, which collects a request's story and writes its bundle, is `gateway/recorder`. The commands are
`pillion/cli/explain_command.py` and `pillion/cli/replay_commands.py`.
"""
