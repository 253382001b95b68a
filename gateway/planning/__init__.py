"""Planning: where a request runs and where its prompt is split. Sans-IO (I9). Open planner.py first."""
