"""Processes started ahead of need: standbys, and the fork server."""
