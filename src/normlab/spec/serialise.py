"""Frozen dataclasses as JSON, and back; nothing that is read can execute code.

Fields may be bool, int, float, str, ``Literal``, ``X | None``, tuples, ``dict[str, X]`` and dataclasses; the
words of a ``Literal`` are left to ``allowed.check``. Numbers that are not finite, for which JSON has no word,
are written as "nan", "inf" and "-inf".
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from normlab.errors import UserError, nearest
from normlab.spec.arguments import is_utf8

T = TypeVar("T")

NOT_FINITE = ("nan", "inf", "-inf")
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a dataclass, with all it contains, as JSON on one line or indented."""
    return json.dumps(to_plain(value), ensure_ascii=False, indent=indent, allow_nan=False)


def from_json(kind: type[T], text: str) -> T:
    """Read a dataclass that ``to_json`` wrote; absent fields take their defaults.

    Raises UserError with the place of the error if the text is not JSON, if a key is unknown (with the
    nearest known one), if a field without a default is missing, or if a value has another type or is out of
    range.
    """
    try:
        content = parsed(text)
    except UserError as error:
        raise UserError(f"this is not JSON: {error}") from error
    return from_plain(kind, content)


def parsed(text: str) -> Any:
    """Parse JSON. Raises UserError with the error and its place."""
    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise UserError(f"{error.msg} in line {error.lineno}, column {error.colno}") from error
    except UserError:
        raise
    except ValueError as error:  # Python reads no whole number of thousands of digits
        raise UserError(str(error)) from error
    except RecursionError:
        raise UserError("lists or objects inside one another, thousands deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object. Raises UserError for a key that occurs twice: JSON would silently take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"the key {twice!r} occurs twice in one object; keep one of them")
    return found


def to_plain(value: Any) -> Any:
    """Turn dataclasses and tuples into dicts and lists that JSON can hold."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def from_plain(kind: Any, value: Any, where: str = "") -> Any:
    """Build ``kind`` from dicts, lists and scalars; ``where`` names the place in errors."""
    origin, items = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        options = [item for item in items if item is not type(None)]
        if len(options) == 1:
            return None if value is None else from_plain(options[0], value, where)
    if origin in (tuple, Sequence):
        return _tuple(items if origin is tuple else (*items, ...), value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            _refuse(value, where, "an object")
        return {key: from_plain(items[1], v, _join(where, key)) for key, v in value.items()}
    return _scalar(kind, value, where)


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        _refuse(value, where, f"an object, the fields of {kind.__name__}")
    fields = _fields(kind)
    for key in value:
        if key not in fields:
            raise UserError(f"unknown key {_join(where, key)!r}{nearest(key, fields)}")
    missing = [name for name, (_, required) in fields.items() if required and name not in value]
    if missing:
        raise UserError(f"{where or kind.__name__} lacks {', '.join(missing)}; add what is missing")
    read = {key: from_plain(fields[key][0], v, _join(where, key)) for key, v in value.items()}
    try:
        return kind(**read)
    except UserError as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from error


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return for each field its type, and whether it has no default."""
    hints = typing.get_type_hints(kind)
    return {
        f.name: (hints[f.name], f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
        for f in dataclasses.fields(kind)
    }


def _tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        _refuse(value, where, "a list")
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        _refuse(value, where, f"a list of {len(items)}")
    pairs = enumerate(zip(items, value, strict=True))
    return tuple(from_plain(item, v, f"{where}[{i}]") for i, (item, v) in pairs)


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        kind = type(typing.get_args(kind)[0])
    if kind not in _WORDS:
        raise TypeError(f"{where}: a field of type {kind} has no JSON form; see normlab.spec.serialise")
    if kind is float and (value in NOT_FINITE or type(value) is int):
        try:
            return float(value)
        except OverflowError:
            _refuse(value, where, "a number below 1.8e308")
    if type(value) is not kind:
        _refuse(value, where, _WORDS[kind])
    if kind is str and not _encodable(str(value)):
        _refuse(value, where, "text without halves of surrogate pairs and without NUL")
    return value


def _encodable(text: str) -> bool:
    """Whether UTF-8 and a path can hold the text; JSON can spell some that they cannot."""
    return "\0" not in text and is_utf8(text)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _refuse(value: Any, where: str, wanted: str) -> NoReturn:
    shown = json.dumps(value, ensure_ascii=False)
    shown = shown if _encodable(shown) else json.dumps(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise UserError(f"{where or 'the whole'} must be {wanted}, got {shown}")
