"""gRPC server reflection, in both of its versions.

Clients request v1, and fall back to v1alpha. The package grpc_reflection only has v1alpha; v1 has the same messages
under another package name, so the same servicer answers both.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1_SERVICE = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Add reflection to a server with these services, by full name, and health."""
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
    """Add v1 to the descriptor pool that reflection uses, unless it is there already."""
    pool, v1alpha = descriptor_pool.Default(), descriptor_pb2.FileDescriptorProto()
    try:
        pool.FindFileContainingSymbol(V1_SERVICE)
    except KeyError:
        reflection_pb2.DESCRIPTOR.CopyToProto(v1alpha)
        text = text_format.MessageToString(v1alpha).replace("reflection.v1alpha", "reflection.v1")
        text = text.replace("reflection/v1alpha", "reflection/v1")
        pool.AddSerializedFile(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString())
