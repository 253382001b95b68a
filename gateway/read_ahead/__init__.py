"""Prefetch of queued requests' KV from lower tiers, so that it is in the pool when they are scheduled."""
