"""Brings KV of requests that wait for their turn from lower tiers, so that it is in the pool when their turn comes."""
