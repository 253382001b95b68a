"""Is the room of streams of what comes into a KV node's pool and leaves it, for readers outside (docs/events.md).

    block_log.py       BlockLog, FollowerStream: the newest changes by number, and what a follower is sent. Sans-IO.
    followers.py       Followers: what a node's pool tells of its changes (BlockWatch), to a bounded number of streams.
    block_mirror.py    BlockMirror: the blocks of a node's pool, as a follower knows them. Sans-IO.
    block_follower.py  BlockFollower: keeps a mirror over lost connections and the node's restarts.
    event_lines.py     EventLines: messages as lines of JSON, for `pillion events`.

Its seam is kvstore/node/block_watch.py. Nothing that changes the pool waits for a follower.
"""
