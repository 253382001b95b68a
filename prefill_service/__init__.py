"""Is a worker's door for prefill ranges: whole blocks of prompts, which become committed KV chunk by chunk. The worker
itself, pillion.engine.worker, is the same as behind the decode service.

Open first: prefill_run.py, which follows one prefill range from its ticket to its last acknowledgement.

Texts that end with a vector come in by pillion.engine.streams, as streams of a decode worker do. It has no sampling,
no client and no scheduling policy: pillion.engine.scheduling decides what runs in a step.
"""
