"""Arguments of public functions and dataclasses, checked against their annotations when they are given."""

from __future__ import annotations

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from normlab.errors import UserError

T = TypeVar("T", bound=Callable[..., Any])

_TYPES: Mapping[Any, tuple[Any, str, str]] = {
    str: (str, "text", "texts"),
    bool: (bool, "True or False", "True or False"),
    int: (Integral, "a whole number", "whole numbers"),
    float: (Real, "a number", "numbers"),
    Path: ((str, os.PathLike), "a path", "paths"),
    types.NoneType: (types.NoneType, "None", "None"),
}
"""For each annotation the class of the values that it allows, and its names, for one and for several."""

_LISTS = (tuple, list, Sequence)
_UNIONS = (typing.Union, types.UnionType)


def validate_arguments(target: T) -> T:
    """Decorate a public function or dataclass, which then refuses arguments that its annotations rule out.

    Text is no list of texts, a bool is no number, and any sequence is a list. A ``Path`` may be given as text
    and a tuple as a list; both are converted. Annotations that say nothing about a value (``Any``, protocols,
    type variables) allow everything, and the words of a ``Literal`` are left to ``allowed.check``.

    The decorated callable raises UserError for an argument of another type.
    """
    function: Any = vars(target)["__init__"] if isinstance(target, type) else target
    signature = inspect.signature(function)
    hints = functools.cache(lambda: typing.get_type_hints(function))
    about = f"{target.__module__}.{target.__qualname__}".removesuffix(".__init__")

    def fit(name: str, value: Any, hint: Any) -> Any:
        try:
            return _fitted(value, hint)
        except _MisfitError as error:
            raise UserError(_refusal(name, value, hint, error.value, about)) from None

    @functools.wraps(function)
    def validated(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # whose own error says what is missing or too much
        for name, value in given.arguments.items():
            hint, kind = hints().get(name, Any), signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD and typing.get_origin(hint) is typing.Unpack:
                entries = typing.get_type_hints(typing.get_args(hint)[0])
                fitted = {key: fit(key, one, entries.get(key, Any)) for key, one in value.items()}
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                fitted = fit(name, value, tuple[hint, ...])
            else:
                fitted = fit(name, value, hint)
            given.arguments[name] = fitted
        return function(*given.args, **given.kwargs)

    if not isinstance(target, type):
        return typing.cast("T", validated)
    setattr(target, "__init__", validated)  # noqa: B010 (no type checker accepts the assignment)
    return target


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold a text: halves of surrogate pairs, as file names can have them, it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _MisfitError(Exception):
    """A value that does not fit its annotation; ``value`` may be an item of the argument."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


def _fitted(value: Any, hint: Any) -> Any:
    """Return the value as the annotation wants it. Raises ``_MisfitError`` if it is none of those."""
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return _fitted_to_one(value, items)
    if origin in _LISTS:
        return _list(value, items, convert=origin is tuple)
    kind = _TYPES[hint][0] if hint in _TYPES else origin or hint
    if kind is Mapping or kind is dict:
        fits = isinstance(value, Mapping)
        for one in value.values() if fits and items else ():
            _fitted(one, items[1])
    elif kind is Callable:
        fits = callable(value)
    elif kind is Iterable:
        fits = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        for one in value if isinstance(value, Collection) and fits and items else ():
            _fitted(one, items[0])
    elif kind is Any or not isinstance(kind, (type, tuple)) or getattr(kind, "_is_protocol", False):
        fits = True
    else:
        fits = _is_a(value, kind)
    if not fits:
        raise _MisfitError(value)
    return Path(value) if hint is Path else value


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value is of a class; a bool is no number, and what UTF-8 cannot hold is no text."""
    if isinstance(value, bool):
        return kind is bool or kind is object
    return isinstance(value, kind) and (kind is not str or is_utf8(str(value)))


def _fitted_to_one(value: Any, hints: Sequence[Any]) -> Any:
    for hint in hints:
        try:
            return _fitted(value, hint)
        except _MisfitError as error:
            if error.value is not value:  # a list, as it should be, with a wrong item
                raise
    raise _MisfitError(value)


def _list(value: Any, items: tuple[Any, ...], *, convert: bool) -> Any:
    indexed = isinstance(value, Collection) and hasattr(value, "__getitem__")
    if not indexed or isinstance(value, (str, bytes, Mapping)):
        raise _MisfitError(value)
    hints = items if convert and len(items) == len(value) and ... not in items else items[:1] * len(value)
    fitted = [_fitted(one, hint) for one, hint in zip(value, hints, strict=bool(items))]
    return tuple(fitted) if convert and items else value


def _refusal(name: str, value: object, hint: Any, culprit: object, about: str) -> str:
    inside = "" if culprit is value else " in it"
    advice = f'type help("{about}")'
    if isinstance(value, (str, bytes, Real, os.PathLike)):
        with suppress(_MisfitError):
            _fitted([value], hint)
            advice = f"type {name}=[{_shown(value)}]"
    if isinstance(culprit, str) and not is_utf8(culprit):
        advice = "UTF-8 cannot hold it; leave out halves of surrogate pairs, such as '\\ud800'"
    return f"{name} is {_words(hint)}, got {_shown(culprit)}{inside}; {advice}"


def _words(hint: Any, *, many: bool = False) -> str:
    """Name what an annotation allows."""
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TYPES:
        return _TYPES[hint][1 + many]
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(_words(item, many=many) for item in items))
    if origin in (*_LISTS, Iterable):
        plain = items and isinstance(items[0], type) and items[0] is not Any
        return ("lists" if many else "a list") + (f" of {_words(items[0], many=True)}" if plain else "")
    if (origin or hint) in (Mapping, dict):
        return "dicts" if many else "a dict"
    if origin is Callable or hint is Callable:
        return "functions" if many else "a function"
    name = getattr(origin or hint, "__name__", str(hint))
    return f"{name}s" if many else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if not isinstance(value, (str, bytes, Real, types.NoneType, os.PathLike)):
        return f"a value of the type {type(value).__name__}"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
