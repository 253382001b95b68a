"""Streams what comes into a KV node's pool and leaves it to readers outside (docs/events.md).

    block_log.py       BlockLog, FollowerStream: the newest changes by number, and what a follower is sent. Sans-IO.
    followers.py       Followers: what a node's pool tells of its changes, to a bounded number of streams.
    block_mirror.py    BlockMirror: the blocks of a node's pool, as a follower knows them. Sans-IO.
    block_follower.py  BlockFollower: keeps a mirror over lost connections and the node's restarts.
    event_lines.py     EventLines: messages as lines of JSON, for `pillion events`.

Nothing that changes the pool waits for a follower.
"""
