"""Holds bundles: what a gateway with --record-path keeps of a request, and the commands that read it.

    bundle.py           the file's format, its key, its bounds; open this first
    explanation.py      a bundle's story as a picture of time and sentences
    explain_command.py  `pillion explain`
    comparison.py       where the answers of a bundle and of its replay differ
    replay.py           a bundle's request once more; replay_client.py sends it
    canary.py           what a canary decides by; canary_run.py follows the folder
    replay_commands.py  `pillion replay`, `pillion canary`

The gateway's side, which collects a request's story and writes its bundle, is `gateway/recorder`.
"""
