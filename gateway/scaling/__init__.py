"""Forecasts how many workers are wanted for the objectives, without I/O (I9). Open forecaster.py first.

No clock, no connection and no token ids come in here.
"""
