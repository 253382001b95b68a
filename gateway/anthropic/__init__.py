"""Serves Anthropic's Messages at the HTTP port. Open anthropic_api.py first."""
