"""The service of prefill workers: whole blocks of prompts in, committed KV chunk by chunk. The worker itself,
pillion.engine.worker, is the same as for decodes.

Open first: prefill_run.py, which follows one prefill range from its ticket to its last acknowledgement.

Texts that end with a vector come in by pillion.engine.streams, like a decode worker's streams.
"""
