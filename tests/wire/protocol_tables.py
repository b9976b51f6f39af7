"""The tables of docs/protocol.md, made of the schema: operations, and every field of every message.

`python -m tests.wire.protocol_tables` writes them anew between the marks; a test holds that they are as it would.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
from msgspec import inspect as schema

from sarp_cluster import types
from sarp_cluster.wire import control, messages
from sarp_cluster.wire.operations import OPERATIONS

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "protocol.md"
SHARED: Final = (messages.Request, messages.Reply)


def described(module: ModuleType) -> dict[tuple[str, str], str]:
    """(class, field) -> what the text under the field says; the class's own under an empty field."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        found[node.name, ""] = ast.get_docstring(node) or ""
        for one, following in zip(node.body, [*node.body[1:], None], strict=True):
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(text, ast.Constant):
                found[node.name, one.target.id] = str(text.value)
    return found


TEXTS: Final = described(messages) | described(control) | described(types)


def meaning(kind: type[Any], field: str) -> str:
    """What a field means, said where it is declared."""
    texts = (TEXTS.get((base.__name__, field), "") for base in kind.__mro__)
    return " ".join(next(filter(None, texts), "").split()).replace("|", r"\|")


def name_of(kind: schema.Type) -> str:  # noqa: PLR0911  # one for each kind of type
    """A type in words."""
    match kind:
        case schema.IntType():
            return f"integer{_bounds(kind.ge, kind.le)}"
        case schema.FloatType():
            return "number"
        case schema.BoolType():
            return "boolean"
        case schema.NoneType():
            return "null"
        case schema.StrType():
            return f"text{_bounds(kind.min_length, kind.max_length)}"
        case schema.BytesType():
            return f"bytes{_bounds(kind.min_length, kind.max_length)}"
        case schema.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case schema.EnumType():
            return ", ".join(f"`{one.value}`" for one in kind.cls)
        case schema.ListType() | schema.VarTupleType():
            return f"list{_bounds(kind.min_length, kind.max_length)} of {name_of(kind.item_type)}"
        case schema.DictType():
            return f"map of {name_of(kind.key_type)} to {name_of(kind.value_type)}"
        case schema.UnionType():
            null_last = sorted(kind.types, key=lambda one: isinstance(one, schema.NoneType))
            return " or ".join(name_of(one) for one in null_last)
        case schema.StructType() | schema.DataclassType():
            return f"[{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
        case schema.RawType():
            return "reply or [ErrorReply](#errorreply)"
        case _:
            raise AssertionError(kind)


def _bounds(low: Any, high: Any) -> str:
    if low is None and high is None:
        return ""
    if low == high:
        return f" ({low})"
    if high is None:
        return f" (≥ {low})"
    return f" (≤ {high:,})" if not low else f" ({low:,}..{high:,})"


def shown() -> list[type[msgspec.Struct]]:
    """The messages of callers, in the order of their declaration."""
    used: set[type[Any]] = {control.Hello, control.Welcome, messages.ErrorReply, messages.ErrorBody, messages.Part}
    for operation in OPERATIONS.values():
        if operation.scope != "node":
            used |= {operation.request, operation.reply}
    for kind in list(used):
        used |= set(_inside(schema.type_info(kind)))
    used = {kind for kind in used if kind not in SHARED}
    order = [name for name, field in TEXTS if not field]
    return sorted(used, key=lambda kind: order.index(kind.__name__))


def _inside(kind: schema.Type) -> Iterator[type[Any]]:
    if isinstance(kind, schema.StructType | schema.DataclassType):
        yield kind.cls
        for field in kind.fields:
            yield from _inside(field.type)
    for inner in (getattr(kind, name, None) for name in ("item_type", "key_type", "value_type")):
        if inner is not None:
            yield from _inside(inner)
    for one in getattr(kind, "types", ()):
        yield from _inside(one)


def operations() -> str:
    """The table of operations."""
    lines = ["| operation | HTTP | scope | request | reply |", "|---|---|---|---|---|"]
    for one in OPERATIONS.values():
        if one.scope == "node":
            continue
        scope = f"`{one.scope}`" if one.scope else "as its items"
        request, reply = (f"[{kind.__name__}](#{kind.__name__.lower()})" for kind in (one.request, one.reply))
        lines.append(f"| `{one.name}` | {one.method} {one.path} | {scope} | {request} | {reply} |")
    return "\n".join(lines)


def schema_text() -> str:
    """A section for each message."""
    parts = []
    for kind in shown():
        info = schema.type_info(kind)
        assert isinstance(info, schema.StructType | schema.DataclassType)
        parts.append(f"### {kind.__name__}\n\n{' '.join(TEXTS[kind.__name__, ''].split())}")
        rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
        if isinstance(info, schema.StructType) and info.tag_field is not None:
            rows.append(f"| `{info.tag_field}` | `{info.tag}` | | which kind of item; only in a batch |")
        for field in info.fields:
            rows.append(f"| `{field.name}` | {name_of(field.type)} | {_default(field)} | {meaning(kind, field.name)} |")
        if len(rows) > 2:
            parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _default(field: schema.Field) -> str:
    if field.required:
        return "*required*"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return f"`{msgspec.json.encode(value).decode()}`"


def filled(text: str) -> str:
    """The document with its tables as they have to be."""
    for name, table in (("operations", operations()), ("schema", schema_text())):
        mark = re.compile(f"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        assert mark.search(text), name
        text = mark.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
