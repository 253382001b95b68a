"""Is a worker's door for streams: prompt tails and decodes under one token budget, streams of tokens out. The worker
itself, pillion.engine.worker, is the same as behind the prefill service.

Open first: session.py, which follows a stream from its submit to its last delta.

    decode_server.py  starts a decode worker; the gRPC service Decode.Connect
    session.py        one gateway's connection: its streams and their pending deltas; what a Submit must look like

It has no scheduling policy (pillion.engine.scheduling) and no text: tokens become text in the gateway.
"""
