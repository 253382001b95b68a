"""Serves the public gRPC service, in gateway_servicer.py: the check of keys, and converters around the gateway.

Policy never comes in here: it belongs to gateway/gateway.py, which the HTTP API shares.
"""
