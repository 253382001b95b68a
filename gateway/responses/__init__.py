"""Serves OpenAI's Responses at the HTTP port, without a memory. Open responses_api.py first.

responses_api.py       the page of the port, and its handler
responses_fields.py    the fields of its bodies
responses_requests.py  from bodies to requests of the gateway
responses_events.py    from deltas to events, or to one response
"""
