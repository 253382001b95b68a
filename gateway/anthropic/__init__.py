"""Anthropic's Messages API on the HTTP port. Start with anthropic_api.py."""
