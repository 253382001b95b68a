"""Forecasts how many workers are wanted for the objectives, without I/O (I9). Open forecaster.py first.

forecaster.py        WorkerForecaster: what the gateway tells it, and the wanted workers of each model and kind
objectives.py        what the latencies shall be, and how long a worker takes to start
arrival_history.py   the rate of arrivals, its line ahead, and how wrong such lines were
worker_needs.py      how many prefill, and how many decode workers a rate needs, by the fitted cost of a step
staffing.py          how long jobs wait for some servers (Erlang)

No clock, no connection and no token ids come in here.
"""
