"""A worker's streams, over one gRPC connection per gateway: commands in, batches of deltas out.

Open first: stream_session.py, which follows a stream from its submit to its last delta.

A decode worker accepts all streams; a prefill worker only texts to embed, which are never sampled. Scheduling is in
pillion.engine.scheduling, detokenization in the gateway.
"""
