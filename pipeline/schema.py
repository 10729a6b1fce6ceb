"""A YAML tree read into frozen dataclasses, every error with its file and line.

yaml.safe_load would drop line numbers and let a second key silently win, so this walks the node tree instead.
Supported field types: str, int, float, bool, dataclasses, `X | None`, `tuple[X, ...]` and unions of these; and
`dict[str, Any]` for keys and values that are passed on to another program unread.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
Check = tuple[Callable[[Any], bool], str]
SCALAR_TAGS = {str: "str", int: "int", float: "float", bool: "bool"}


def setting(expected: str, holds: Callable[[Any], bool], **field: Any) -> Any:
    """A dataclass field whose value (each element, for a tuple) must satisfy `holds`; `expected` says so in words."""
    return dataclasses.field(metadata={"check": (holds, expected)}, **field)


def compose(text: str, name: str) -> yaml.Node | None:
    """The node tree of one YAML document; marks carry `name`. ValueError when it is not YAML."""
    loader = yaml.SafeLoader(text)
    loader.name = name
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name}:{mark.line + 1}" if mark else name
        raise ValueError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    finally:
        loader.dispose()


def read(node: yaml.Node, kind: type[T]) -> T:
    """`node` as the dataclass `kind`. ValueError naming file, line, key, what was got and what was expected."""
    return typing.cast(T, _read(node, kind, path=""))


def override(root: yaml.Node, assignment: str) -> None:
    """Put one `a.b=value` (value in YAML, list elements by index) into the tree. ValueError for another form."""
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise ValueError(f"--set {assignment}: got no key=value, expected for example --set traces.batch=4")
    name = f"--set {assignment}"
    value = compose(text, name) or compose("null", name)
    assert value is not None
    _put(root, path.strip().split("."), value, assignment)


def where(node: yaml.Node) -> str:
    """`file:line`, or the --set option a node came from."""
    mark = node.start_mark
    return mark.name if mark.name.startswith("--set ") else f"{mark.name}:{mark.line + 1}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Advice for a misspelt name: the nearest known one, else all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"


def _put(node: yaml.Node, path: list[str], value: yaml.Node, assignment: str) -> None:
    head, rest = path[0], path[1:]
    if isinstance(node, yaml.SequenceNode):
        _put_in_list(node, head, rest, value, assignment)
        return
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"--set {assignment}: {where(node)} holds a single value, so {head!r} cannot be set in it")
    for index, (key, child) in enumerate(node.value):
        if key.value == head:
            if rest:
                _put(child, rest, value, assignment)
            else:
                node.value[index] = (_key(head, value), value)
            return
    child = value if not rest else _mapping(value)
    node.value.append((_key(head, value), child))
    if rest:
        _put(child, rest, value, assignment)


def _put_in_list(node: yaml.SequenceNode, head: str, rest: list[str], value: yaml.Node, assignment: str) -> None:
    if not head.isdigit() or int(head) >= len(node.value):
        raise ValueError(
            f"--set {assignment}: got {head!r}, expected an index below {len(node.value)} at {where(node)}"
        )
    if rest:
        _put(node.value[int(head)], rest, value, assignment)
    else:
        node.value[int(head)] = value


def _key(name: str, at: yaml.Node) -> yaml.ScalarNode:
    return yaml.ScalarNode("tag:yaml.org,2002:str", name, start_mark=at.start_mark)


def _mapping(at: yaml.Node) -> yaml.MappingNode:
    return yaml.MappingNode("tag:yaml.org,2002:map", [], start_mark=at.start_mark)


def _read(node: yaml.Node, kind: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(node, typing.cast(type, kind), path)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _read_union(node, typing.get_args(kind), path)
    if typing.get_origin(kind) is tuple:
        if not isinstance(node, yaml.SequenceNode):
            raise _wrong(node, kind, path)
        element = typing.get_args(kind)[0]
        return tuple(_read(child, element, f"{path}[{index}]") for index, child in enumerate(node.value))
    if typing.get_origin(kind) is dict:
        if not isinstance(node, yaml.MappingNode):
            raise _wrong(node, kind, path)
        return _plain(node, path)
    return _read_scalar(node, kind, path)


def _plain(node: yaml.Node, path: str) -> Any:
    """What YAML says, with no type asked for; a repeated key is an error here too."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, f"{path}[{index}]") for index, child in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return yaml.SafeLoader("").construct_object(node)
    values: dict[str, Any] = {}
    for key, child in node.value:
        full = _join(path, str(key.value))
        if str(key.value) in values:
            raise ValueError(f"{where(key)}: {full!r} is given twice; keep one")
        values[str(key.value)] = _plain(child, full)
    return values


def _read_dataclass(node: yaml.Node, kind: type, path: str) -> Any:
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(node, kind, path)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, child in node.value:
        name, full = str(key.value), _join(path, str(key.value))
        if name not in fields:
            raise ValueError(f"{where(key)}: unknown key {full!r}; {nearest(name, fields)}")
        if name in values:
            raise ValueError(f"{where(key)}: {full!r} is given twice; keep one")
        values[name] = _read(child, hints[name], full)
        _check(child, values[name], fields[name].metadata.get("check"), full)
    _require(node, fields.values(), values, path)
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where(node)}: {path or 'config'}: {error}") from error


def _require(node: yaml.Node, fields: Iterable[dataclasses.Field[Any]], values: dict[str, Any], path: str) -> None:
    for field in fields:
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if not optional and field.name not in values:
            raise ValueError(f"{where(node)}: missing key {_join(path, field.name)!r}; expected {describe(field.type)}")


def _check(node: yaml.Node, value: Any, check: Check | None, path: str) -> None:
    if check is None or value is None:
        return
    holds, expected = check
    for element in value if isinstance(value, tuple) else (value,):
        if not holds(element):
            raise ValueError(f"{where(node)}: {path}: got {element!r}, expected {expected}")


def _read_union(node: yaml.Node, kinds: tuple[Any, ...], path: str) -> Any:
    if type(None) in kinds and isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    fitting = [kind for kind in kinds if (typing.get_origin(kind) is tuple) == isinstance(node, yaml.SequenceNode)]
    if not fitting:
        raise _wrong(node, kinds, path)
    return _read(node, fitting[0], path)


def _read_scalar(node: yaml.Node, kind: Any, path: str) -> Any:
    tag = node.tag.rpartition(":")[2]
    if not isinstance(node, yaml.ScalarNode):
        raise _wrong(node, kind, path)
    if kind is float and tag == "str" and node.style is None and _is_float(node.value):
        return float(node.value)  # YAML 1.1 takes 1e-4, without a dot, for a string
    if tag != SCALAR_TAGS[kind] and (kind, tag) != (float, "int"):
        raise _wrong(node, kind, path)
    return kind(yaml.SafeLoader("").construct_object(node))


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _wrong(node: yaml.Node, kind: Any, path: str) -> ValueError:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    got = (
        repr(node.value)
        if isinstance(node, yaml.ScalarNode)
        else {"MappingNode": "keys and values", "SequenceNode": "a list"}[type(node).__name__]
    )
    expected = " or ".join(describe(each) for each in kinds)
    return ValueError(f"{where(node)}: {path or 'config'}: got {got}, expected {expected}")


def describe(kind: Any) -> str:
    """A field type in words."""
    if isinstance(kind, str):
        return f"a value of type {kind}"
    if dataclasses.is_dataclass(kind):
        return f"keys ({', '.join(field.name for field in dataclasses.fields(kind))})"
    if typing.get_origin(kind) is tuple:
        return f"a list of {typing.get_args(kind)[0].__name__}"
    if typing.get_origin(kind) is dict:
        return "keys and values"
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[kind]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
