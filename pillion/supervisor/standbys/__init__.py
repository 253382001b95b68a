"""Makes processes ready ahead of their need (--standby, --fork-server)."""
