"""The service of prefill workers: whole blocks of prompts in, an acknowledgement per committed chunk out. The worker
itself, pillion.engine.worker, is the same as for decodes.

Open first: prefill_run.py, which follows one prefill range from its ticket to its last acknowledgement.

Texts to embed are served by pillion.engine.streams, like a decode worker's streams.
"""
