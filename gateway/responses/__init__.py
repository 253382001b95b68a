"""OpenAI's Responses API on the HTTP port, without storage. Start with responses_api.py."""
