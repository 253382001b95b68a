"""Where a request runs and where its prompt is split: pure decisions without I/O (I9). Open planner.py first.

planner.py            make_plan: workers, cached prefix, split, chunks
plan_auto.py          the choice of --split-policy auto, by predictions
plan_cost.py          what a plan costs, from what workers publish
cluster_snapshot.py   the planner's input: the split policy, and the cluster when a request is planned
candidates.py         of very many workers, those that a request is planned with
sent_adapters.py      workers that load an adapter for this gateway's requests
cluster_view.py       the registry's last answer, and what the gateway's connections know better

No clock, no connection and no token ids come in here.
"""
