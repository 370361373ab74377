"""JSON schemas that text can be held to: rewritten into what the compiler of grammars takes exactly. Pure.

What is made of the rewritten schema is valid by the client's own, though not everything that is valid can be made:
properties keep their order, and where a schema allows others without saying what they are, there are none. A keyword
that cannot be held to is refused, by its place in the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mstar.api_server.grammar.number_rules import number_rules
from mstar.api_server.grammar.schema_error import SchemaError
from mstar.api_server.grammar.schema_form import KEYWORDS, check_form, count_of, kinds_of, types_of
from mstar.api_server.grammar.schema_merging import Comparisons, MergeError, merged
from mstar.api_server.grammar.string_rules import compiled_pattern, string_rules

MAX_DEPTH = 48
MAX_NODES = 5000
"""Schemas inside of one, those behind references included."""
REFUSED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "unevaluatedItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
Schema = dict[str, Any]


def enforceable(schema: Any) -> Schema:
    """The schema, rewritten.

    Raises:
        SchemaError: it is no schema, or one that cannot be held to.
    """
    rewriting = _Rewriting(schema)
    root = rewriting.schema(schema, "", 0)
    rewriting.check_that_references_end()
    return {**root, "$defs": rewriting.definitions} if rewriting.definitions else root


class _Rewriting:
    """One schema. `definitions`: what references lead to, by the names they have now."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._num_left = MAX_NODES
        self._comparisons = Comparisons(lambda schema: self._resolved(schema, ""))
        self.definitions: dict[str, Schema] = {}

    def check_that_references_end(self) -> None:
        """A union of one branch has become that branch, which may be a reference to where it stands."""
        for definition in self.definitions.values():
            seen: set[str] = set()
            while "$ref" in definition:
                name = definition["$ref"].rpartition("/")[2]
                if name in seen:
                    raise SchemaError(".$ref", "the reference leads to itself")
                seen.add(name)
                definition = self.definitions[name]

    def schema(self, schema: Any, path: str, depth: int) -> Schema:
        self._num_left -= 1
        if depth > MAX_DEPTH or self._num_left < 0:
            raise SchemaError(path, f"it is nested more than {MAX_DEPTH} deep, or has more than {MAX_NODES} parts")
        if schema is True:
            return {}
        if schema is False:
            raise SchemaError(path, "false allows nothing")
        if not isinstance(schema, Mapping):
            raise SchemaError(path, "a schema is an object, true or false")
        check_form(schema, path)
        for keyword in REFUSED:
            if keyword in schema:
                raise SchemaError(f"{path}.{keyword}", f"{keyword!r} cannot be enforced")
        if "$ref" in schema:
            return self._reference(schema, path, depth)
        if "enum" in schema or "const" in schema:
            return self._values(schema, path)
        for union in ("allOf", "anyOf", "oneOf"):
            if union in schema:
                return self._combined(schema, union, path, depth)
        return self._typed(schema, path, depth)

    def _reference(self, schema: Mapping[str, Any], path: str, depth: int) -> Schema:
        if others := sorted(
            set(schema).intersection((*_ASSERTING, "anyOf", "oneOf", "allOf", "enum", "const", "type"))
        ):
            raise SchemaError(f"{path}.{others[0]}", f"{others[0]!r} beside $ref cannot be enforced")
        reference = schema["$ref"]
        target = self._target(reference, path)
        if reference not in self._names:
            self._names[reference] = name = f"d{len(self._names)}"
            self.definitions[name] = self.schema(target, f"{path}.$ref", depth + 1)
        return {"$ref": f"#/$defs/{self._names[reference]}"}

    def _target(self, reference: Any, path: str) -> Any:
        """What a reference leads to in the end: not to another reference."""
        seen: set[Any] = set()
        while True:
            if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
                raise SchemaError(f"{path}.$ref", "a reference must lead into this schema: #/$defs/NAME")
            if reference in seen:
                raise SchemaError(f"{path}.$ref", "the reference leads to itself")
            seen.add(reference)
            found = self._root
            for part in reference[1:].split("/")[1:]:
                name = part.replace("~1", "/").replace("~0", "~")
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is None:
                raise SchemaError(f"{path}.$ref", f"the reference {reference[:80]!r} leads nowhere")
            if not (isinstance(found, Mapping) and "$ref" in found):
                return found
            reference = found["$ref"]

    def _resolved(self, schema: Any, path: str) -> Any:
        """Without a reference at its top."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            schema = self._target(schema["$ref"], path)
        if isinstance(schema, Mapping):
            check_form(schema, path)
        return schema

    def _values(self, schema: Mapping[str, Any], path: str) -> Schema:
        if others := sorted(set(schema).intersection((*_ASSERTING, "anyOf", "oneOf", "allOf"))):
            raise SchemaError(f"{path}.{others[0]}", f"{others[0]!r} beside enum or const cannot be enforced")
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            const = schema["const"]
            values = [value for value in values if value == const and kinds_of(value) == kinds_of(const)]
        types = types_of(schema, path)
        values = [value for value in values if types is None or not kinds_of(value).isdisjoint(types)]
        if not values:
            raise SchemaError(path, "no value of enum or const is of its type")
        return {"enum": values}

    def _combined(self, schema: Mapping[str, Any], union: str, path: str, depth: int) -> Schema:
        """`union` takes the rest of the schema into its branches."""
        branches = schema[union]
        if not isinstance(branches, list) or not branches:
            raise SchemaError(f"{path}.{union}", "it must be an array of schemas")
        rest = {key: value for key, value in schema.items() if key != union and key in _MERGED}
        try:
            if union == "allOf":
                if len(branches) == 1 and not rest:
                    return self.schema(branches[0], f"{path}.allOf[0]", depth + 1)
                whole = rest
                for branch in branches:
                    whole = merged(whole, self._resolved(branch, path))
                return self.schema(whole, path, depth + 1)
            if rest:
                branches = [merged(rest, self._resolved(branch, path)) for branch in branches]
        except MergeError as error:
            raise SchemaError(f"{path}.{union}", f"{union!r} cannot be enforced here: {error}") from None
        if union == "oneOf" and not self._comparisons.are_disjoint(branches):
            raise SchemaError(
                f"{path}.oneOf",
                "'oneOf' cannot be enforced where a value may fit several branches; use anyOf, or give each branch a "
                "required property with a const of its own",
            )
        options = [
            self.schema(branch, f"{path}.{union}[{index}]", depth + 1)
            for index, branch in enumerate(branches)
            if branch is not False
        ]
        if not options:
            raise SchemaError(f"{path}.{union}", "no branch allows anything")
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _typed(self, schema: Mapping[str, Any], path: str, depth: int) -> Schema:
        types = types_of(schema, path)
        if types is None:
            types = [kind for kind, keywords in KEYWORDS.items() if not set(keywords).isdisjoint(schema)]
            if not types:
                return {}
        options = [self._of_type(kind, schema, path, depth) for kind in types]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _of_type(self, kind: str, schema: Mapping[str, Any], path: str, depth: int) -> Schema:
        match kind:
            case "string":
                return {"type": kind, **string_rules(schema, path)}
            case "integer" | "number":
                rules = number_rules(kind, schema, path)
                return rules if "enum" in rules else {"type": kind, **rules}
            case "array":
                return {"type": kind, **self._array_rules(schema, path, depth)}
            case "object":
                return {"type": kind, **self._object_rules(schema, path, depth)}
            case _:
                return {"type": kind}

    def _array_rules(self, schema: Mapping[str, Any], path: str, depth: int) -> Schema:
        least, most = count_of(schema, "minItems", path), count_of(schema, "maxItems", path)
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise SchemaError(f"{path}.uniqueItems", "'uniqueItems' cannot be enforced")
        rules: Schema = {}
        prefix, items = schema.get("prefixItems"), schema.get("items")
        if isinstance(items, list):  # as it was written before draft 2020-12
            prefix, items = items, schema.get("additionalItems")
        if prefix is not None:
            if not isinstance(prefix, list):
                raise SchemaError(f"{path}.prefixItems", "it must be an array of schemas")
            rules["prefixItems"] = [
                self.schema(item, f"{path}.prefixItems[{index}]", depth + 1) for index, item in enumerate(prefix)
            ]
        if items is False:
            rules["items"] = False
            if prefix is None:
                rules["maxItems"] = 0
        elif items is not None:
            rules["items"] = self.schema(items, f"{path}.items", depth + 1)
        if least:
            rules["minItems"] = least
        if most is not None:
            rules["maxItems"] = most
        return rules

    def _object_rules(self, schema: Mapping[str, Any], path: str, depth: int) -> Schema:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
        if "patternProperties" in schema and ("properties" in schema or required):
            raise SchemaError(f"{path}.patternProperties", "'patternProperties' beside properties cannot be enforced")
        own = {name: value for name, value in properties.items() if value is not False or name in required}
        for name in required:
            if name not in own:
                if others is False:
                    raise SchemaError(f"{path}.required", f"{name[:80]!r} is required and not allowed")
                own[name] = {} if others is None else others
        rules: Schema = {}
        if own:
            rules["properties"] = {
                name: self.schema(value, f"{path}.properties.{name}", depth + 1) for name, value in own.items()
            }
        elif "properties" in schema and others is None:
            others = False
        if required:
            rules["required"] = list(dict.fromkeys(required))
        if isinstance(others, bool):
            rules["additionalProperties"] = others
        elif others is not None:
            rules["additionalProperties"] = self.schema(others, f"{path}.additionalProperties", depth + 1)
        if "patternProperties" in schema:
            rules["patternProperties"] = self._by_pattern(schema["patternProperties"], path, depth)
            rules.setdefault("additionalProperties", False)
        if "propertyNames" in schema:
            names = self.schema(schema["propertyNames"], f"{path}.propertyNames", depth + 1)
            if set(names) - {"type", "pattern", "enum", "minLength", "maxLength"} or own:
                why = "only a pattern or a length, without properties, can be enforced"
                raise SchemaError(f"{path}.propertyNames", why)
            rules["propertyNames"] = names
        for keyword in ("minProperties", "maxProperties"):
            if (count := count_of(schema, keyword, path)) is not None:
                rules[keyword] = count
        return rules

    def _by_pattern(self, schemas: Any, path: str, depth: int) -> Schema:
        if not isinstance(schemas, Mapping) or len(schemas) != 1:
            raise SchemaError(f"{path}.patternProperties", "only one pattern can be enforced")
        [(pattern, value)] = schemas.items()
        compiled = compiled_pattern(pattern, f"{path}.patternProperties")
        return {compiled: self.schema(value, f"{path}.patternProperties.{pattern}", depth + 1)}


_ASSERTING = tuple(keyword for keywords in KEYWORDS.values() for keyword in keywords)
_MERGED = frozenset((*_ASSERTING, "type", "anyOf", "oneOf", "allOf"))
