"""Comparison of two sets of protos: changes that break components built from the older one."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet

Types = dict[str, DescriptorProto | EnumDescriptorProto]


def broken_promises(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Return a sentence for each item of ``old`` that ``new`` renumbers, retypes, renames or removes. A field may be
    removed if its number and name are reserved; additions are allowed."""
    before, after = dict(_types(old)), dict(_types(new))
    found = []
    for name, kind in before.items():
        if type(now := after.get(name)) is not type(kind):
            found.append(f"{name} is gone")
        elif isinstance(kind, DescriptorProto) and isinstance(now, DescriptorProto):
            found += _fields(name, kind, now)
        elif isinstance(kind, EnumDescriptorProto) and isinstance(now, EnumDescriptorProto):
            values = {(value.number, value.name) for value in now.value}
            found += [f"{name}.{v.name} = {v.number} is gone" for v in kind.value if (v.number, v.name) not in values]
    methods = dict(_methods(new))
    for name, shape in _methods(old):
        if methods.get(name) != shape:
            found.append(f"{name}{shape} is {methods.get(name, 'gone')}")
    return found


def _fields(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    now = {field.number: field for field in new.field}
    numbers = {field.name: field.number for field in new.field}
    for field in old.field:
        kept = now.get(field.number)
        if kept is None:
            reserved = any(kept_out.start <= field.number < kept_out.end for kept_out in new.reserved_range)
            if not (reserved and field.name in new.reserved_name):
                moved = f"now has {numbers[field.name]}" if field.name in numbers else "is gone and not reserved"
                yield f"{name}.{field.name} = {field.number} {moved}"
        elif _shape(old, field) != _shape(new, kept):
            yield f"{name}: {field.number} was {_shape(old, field)}, and is {_shape(new, kept)}"
    for kept_out in old.reserved_range:
        yield from (
            f"{name}.{now[n].name} takes {n}, which is reserved" for n in now if kept_out.start <= n < kept_out.end
        )


def _shape(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return a field's properties that its readers depend on, beside its number: name, type, cardinality, oneof and
    `optional` (whose zero is not its absence)."""
    label = FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
    if field.proto3_optional:
        label = "explicit"
    elif field.HasField("oneof_index"):
        label = f"one of {message.oneof_decl[field.oneof_index].name}"
    kind = field.type_name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"{label} {kind} {field.name}"


def _types(files: FileDescriptorSet) -> Iterator[tuple[str, DescriptorProto | EnumDescriptorProto]]:
    def inside(name: str, message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto | EnumDescriptorProto]]:
        yield name, message
        yield from ((f"{name}.{enum.name}", enum) for enum in message.enum_type)
        for nested in message.nested_type:
            yield from inside(f"{name}.{nested.name}", nested)

    for file in files.file:
        yield from ((f"{file.package}.{enum.name}", enum) for enum in file.enum_type)
        for message in file.message_type:
            yield from inside(f"{file.package}.{message.name}", message)


def _methods(files: FileDescriptorSet) -> Iterator[tuple[str, str]]:
    for file in files.file:
        for service in file.service:
            for rpc in service.method:
                asked, answered = ("stream " * flag for flag in (rpc.client_streaming, rpc.server_streaming))
                shape = f"({asked}{rpc.input_type}) returns ({answered}{rpc.output_type})"
                yield f"{file.package}.{service.name}.{rpc.name}", shape
