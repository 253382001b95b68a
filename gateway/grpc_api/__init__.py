"""Public gRPC service (gateway_servicer.py): checks API keys and converts messages.

Policy is in gateway/gateway.py, which the HTTP API shares.
"""
