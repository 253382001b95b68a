"""Runs batches, files of requests, in the background, as OpenAI's API has them. Open batch_runner.py first.

batch_records.py   what is kept of a file and of a batch, and how clients see it (no I/O)
batch_lines.py     a request in the input, an entry of the journal, a line of the output (no clock, no I/O)
batch_machine.py   which line runs next, which runs again, and when and how a batch ends (no clock, no I/O)
batch_folder.py    the folder of --batch-path: files, batches, bounds and ages
batch_claim.py     one batch in this process's hands: its lock, its input, its journal and its outputs
batch_runner.py    claims batches, and runs their lines through the gateway like calls
batch_calls.py     the lines of batches, served by the pages of the HTTP port that allow it
batches_api.py     pages of /v1/files and /v1/batches
multipart.py       the form in which a file comes

The HTTP port brings files and asks for batches; what a line of a batch does is what the same call would do.
"""
