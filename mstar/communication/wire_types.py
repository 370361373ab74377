"""Which types may cross a process border: `describe` walks a type and refuses what it cannot name.

Pure functions on type objects, run once at import by `mstar.communication.wire`; any process, no torch.
"""

from __future__ import annotations

from msgspec import inspect

_SCALARS: dict[type, str] = {
    inspect.NoneType: "null",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
}


def describe(message_type: object) -> str:
    """Canonical text of a wire type: every field by name and type, in order. Equal text means equal encoding.

    Raises:
        TypeError: a field, however deep, is untyped (`Any`, `object`, a bare `list`, `dict`, `tuple` or `set`, a type
            variable) or of a type that no decoder can check; the message gives the path to it.
    """
    return _describe(inspect.type_info(message_type), _name_of(message_type), frozenset())


def _describe(node: inspect.Type, path: str, outer: frozenset[type]) -> str:
    scalar = _SCALARS.get(type(node))
    if scalar is not None:
        return scalar
    match node:
        case inspect.LiteralType(values=values):
            return f"literal({', '.join(sorted(map(repr, values)))})"
        case inspect.EnumType(cls=cls):
            return f"enum({', '.join(sorted(repr(member.value) for member in cls))})"
        case inspect.UnionType(types=types):
            return f"union({', '.join(_describe(part, path, outer) for part in types)})"
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return f"array({_describe(item, f'{path}[]', outer)})"
        case inspect.TupleType(item_types=items):
            return f"tuple({', '.join(_describe(item, f'{path}[{i}]', outer) for i, item in enumerate(items))})"
        case inspect.DictType(key_type=key, value_type=value):
            return f"map({_describe(key, f'{path} key', outer)}, {_describe(value, f'{path}{{}}', outer)})"
        case inspect.StructType(cls=cls) if cls in outer:
            return f"again({cls.__name__})"
        case inspect.StructType(cls=cls, fields=fields):
            inner = outer | {cls}
            columns = ", ".join(
                f"{field.encode_name}{'' if field.required else '?'}: "
                f"{_describe(field.type, f'{path}.{field.name}', inner)}"
                for field in fields
            )
            return f"struct {node.tag or cls.__name__}{' array' if node.array_like else ''}({columns})"
        case inspect.AnyType():
            raise TypeError(f"{path} is untyped; a message says what each value is (no Any, no bare list or dict)")
        case inspect.CustomType(cls=cls):
            raise TypeError(f"{path} is untyped: no decoder can check a value of class {cls.__qualname__}")
    raise TypeError(f"{path}: {type(node).__name__} has no place on the wire; use numbers, str, bytes, enums, structs")


def _name_of(message_type: object) -> str:
    return message_type.__name__ if isinstance(message_type, type) else str(message_type)
