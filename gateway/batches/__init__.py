"""Batches, files of requests, run in the background as in OpenAI's API. Start with batch_runner.py.

batch_records.py   records of files and batches, and their form for clients (no I/O)
batch_lines.py     lines of input, journal and output (no clock, no I/O)
batch_machine.py   which line runs or is retried next, when and how a batch ends (no clock, no I/O)
batch_folder.py    the folder of --batch-path: files, batches, limits, expiry
batch_claim.py     a batch claimed by this process: lock, input, journal, outputs
batch_runner.py    claims batches and runs their lines through the gateway
batch_calls.py     serves a line by the HTTP port's handler of its url
batches_api.py     /v1/files and /v1/batches
multipart.py       the form of an upload

A line has the effect of the same HTTP call.
"""
