"""Serves OpenAI's Responses at the HTTP port, without a memory. Open responses_api.py first."""
