"""Answers clients that ask a server for its services and messages: the reflection of gRPC, in both of its versions.

Clients ask for v1 today, and for v1alpha where there is no v1. The package grpc_reflection has v1alpha alone; v1 has
the same messages under another package name, so the same servicer answers both.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1_SERVICE = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Add reflection to a server that has these services, by their full names, and that of health."""
    _describe_v1()
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME, V1_SERVICE)
    servicer = reflection.aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(V1_SERVICE, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))


def _describe_v1() -> None:
    """Make v1 known to the pool of descriptors from which reflection answers, unless somebody else has."""
    pool, alpha = descriptor_pool.Default(), descriptor_pb2.FileDescriptorProto()
    try:
        pool.FindFileContainingSymbol(V1_SERVICE)
    except KeyError:
        reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
        text = text_format.MessageToString(alpha).replace("reflection.v1alpha", "reflection.v1")
        text = text.replace("reflection/v1alpha", "reflection/v1")
        pool.AddSerializedFile(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString())
