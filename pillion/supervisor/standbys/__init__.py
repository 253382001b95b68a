"""Starts processes ahead of need (--standby, --fork-server)."""
