"""Serves Anthropic's Messages at the HTTP port. Open anthropic_api.py first.

anthropic_api.py       the pages of the port, and their handlers
anthropic_fields.py    the fields of their bodies
anthropic_requests.py  from bodies to requests of the gateway
anthropic_events.py    from deltas to events, or to one message
anthropic_errors.py    errors as Anthropic's clients know them
signatures.py          thoughts that are not shown, in the signatures of their blocks
"""
