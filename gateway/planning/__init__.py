"""Decides where a request runs and where its prompt is split, without I/O (I9). Open planner.py first.

route_planner.py      RoutePlanner: the plans of one gateway, and what it remembers of them
planner.py            make_plan: workers, cached prefix, split, chunks
split_decision.py     the choice of workers and of the split, by predictions or at a fixed place
plan_cost.py          what a plan costs, from what workers publish
forecast.py           what a gateway tells of its requests, so that wanted workers can be forecast
cluster_view.py       the registry's last answer, what the gateway's connections know better, and the planner's input

No clock, no connection and no token ids come in here.
"""
