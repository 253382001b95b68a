"""Serves a worker's streams, over one gRPC connection for each gateway: commands in, batches of deltas out.

Open first: stream_session.py, which follows a stream from its submit to its last delta.

A decode worker takes every stream. A prefill worker takes those that end with a vector, because nothing of them is
sampled. There is no scheduling policy here (pillion.engine.scheduling) and no text: tokens become text in the gateway.
"""
