"""Where protobuf stops: pairs of ``from_pb`` and ``to_pb`` between messages and frozen dataclasses, by service."""
