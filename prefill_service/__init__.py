"""The prefill service: turns whole blocks of prompts into committed KV, chunk by chunk.

Open first: span.py, which follows one span from its ticket to its last acknowledgement.

    prefill_server.py   starts a prefill worker; the gRPC service Prefill.RunSpan
    span.py             one span: checked, ticket adopted, run, acknowledged

No sampling, no client and no scheduling policy: what runs in a step is pillion.engine.scheduling's to decide.
"""
