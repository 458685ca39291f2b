"""Read files and options strictly, with pydantic; everything inside is a plain frozen dataclass.

Unless declared otherwise, every field of a configuration changes numbers, enters the run id and is a flag of
``normlab train``, with its docstring as the help text. Annotations give the bounds. Neither text nor a bool
counts as a number, and an unknown option is refused with the nearest known one. JSON has no numbers that are
not finite, so these are written as "nan", "inf" and "-inf". Pydantic is imported only when something is read:
``--help`` does not need it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, field
from math import inf
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Lt

from normlab.errors import UserError, nearest

if typing.TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")

Count: TypeAlias = Annotated[int, Ge(0), Lt(2**63)]
"""Whole numbers must be below 2**63, because tensors cannot hold more."""
Size: TypeAlias = Annotated[int, Ge(1), Lt(2**63)]
Share: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Positive: TypeAlias = Annotated[float, Gt(0), Lt(inf)]
Amount: TypeAlias = Annotated[float, Ge(0), Lt(inf)]
"""A bound also refuses NaN."""


def machine(default: T, *, flag: bool = True) -> T:
    """Declare a field that does not change numbers (a path, a device, a cadence): it is not in the run id."""
    return field(default=default, metadata={"numbers": False, "flag": flag})


def since(default: T, *, introduced: T, flag: bool = True) -> T:
    """Declare a field whose default was different when it was introduced, so that old runs keep their ids."""
    return field(default=default, metadata={"introduced": introduced, "flag": flag})


def no_flag(default: T) -> T:
    """Declare a field that the command line does not offer: a recipe, a configuration or a flag sets it."""
    return field(default=default, metadata={"flag": False})


def changes_numbers(declared: Field[Any]) -> bool:
    """Whether a field enters the run id."""
    return declared.metadata.get("numbers", True)


def is_flag(declared: Field[Any]) -> bool:
    """Whether the command line offers a field."""
    return declared.metadata.get("flag", True)


def flag_name(name: str) -> str:
    """Return a field's name as a flag: ``max_len`` becomes ``--max-len``."""
    return f"--{name.replace('_', '-')}"


C = TypeVar("C", bound=Callable[..., Any])

NOT_FINITE: Final = ("nan", "inf", "-inf")
_UNUSABLE: Final = re.compile(r"[\ud800-\udfff]|(?<!\\)(?:\\\\)*\\u0000")
_UNKNOWN: Final = "unexpected_keyword_argument"
_BOUNDS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_WORDS: Final = {
    "Input should be ": "",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    ", unable to parse raw data as a unicode string": " that UTF-8 can hold",
    "a valid boolean": "True or False",
    "a valid tuple": "a list",
    "a valid array": "a list",
    "a valid dictionary": "an object",
    "an instance of Sequence": "a list",
    "'str' instances are not allowed as a Sequence value": "a list and not one text",
    "an instance of Path": "a path",
    "callable": "a function",
    "Tuple should have ": "a list of ",
    "Field required": "a longer list",
}
"""Pydantic's words for what is allowed, and plain words for the same."""


def validated(target: C) -> C:
    """Decorate a public function or dataclass, which then refuses what its annotations do not allow.

    A tuple may be given as a list, a path as text and a fraction as a whole number; they are converted. The
    decorated callable raises UserError for a wrong value, and for an unknown option.
    """
    function: Any = vars(target)["__init__"] if isinstance(target, type) else target
    signature = inspect.signature(function)
    kinds = functools.cache(lambda: _kinds(function, signature))

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options.keys() - kinds().keys():
            raise UserError(f"unknown option {name!r}{nearest(name, kinds())}")
        bound = signature.bind(*args, **options)  # its TypeError says what is missing
        given = bound.arguments
        for name, value in given.items():
            if name in kinds():
                given[name] = _argument(name, value, kinds()[name])
            elif signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                given[name] = {key: _argument(key, option, kinds()[key]) for key, option in value.items()}
        return function(*bound.args, **bound.kwargs)

    if not isinstance(target, type):
        return typing.cast("C", checked)
    setattr(target, "__init__", checked)  # noqa: B010 (no type checker accepts the assignment)
    return target


def _kinds(function: Any, signature: inspect.Signature) -> dict[str, Any]:
    """Return the annotation of every option, including those of ``**options: Unpack[Options]``."""
    hints = typing.get_type_hints(function, include_extras=True)
    kinds = dict[str, Any]()
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            kinds |= typing.get_type_hints(typing.get_args(hints[name])[0], include_extras=True)
        elif name != "self":
            kind = hints.get(name, Any)
            kinds[name] = tuple[kind, ...] if parameter.kind is parameter.VAR_POSITIONAL else kind
    return kinds


def _argument(name: str, value: Any, kind: Any) -> Any:
    """Return an argument as its annotation wants it; anything with an order becomes a list."""
    if isinstance(value, str):
        if kind is Path:
            return Path(value)
    elif isinstance(value, Collection) and hasattr(value, "__getitem__"):
        shapes = {typing.get_origin(shape) for shape in (kind, *typing.get_args(kind))}
        if not isinstance(value, (bytes, Mapping)):
            if tuple in shapes:
                value = tuple(value)
            elif Sequence in shapes:
                value = list(value)
    try:
        return _adapter(kind).validate_python((value,))[0]
    except ValueError as error:  # pydantic is imported with the adapter, not again for each argument
        wrong = typing.cast("ValidationError", error).errors(include_url=False)
    allowed = " or ".join(dict.fromkeys(map(_allowed, wrong)))
    advice = f"; type {name}=[{value!r}]" if "a list" in allowed and isinstance(value, str | float) else ""
    place = functools.reduce(_inside, [key for key in wrong[0]["loc"][1:] if isinstance(key, int)], name)
    raise UserError(f"{place} must be {allowed}, got {_shown(wrong[0]['input'])}{advice}")


def from_plain(kind: Any, content: Any, where: str = "", *, more: bool = False) -> Any:
    """Build ``kind`` from dicts, lists and scalars; absent fields take their defaults.

    Raises UserError with the place, below ``where``, if a key is unknown (with the nearest known one), if a
    field without a default is missing, or if a value has another type or is out of range. With ``more``, keys
    that ``kind`` does not have are ignored.
    """
    from pydantic import ValidationError

    # by way of JSON, where pydantic's strict mode takes a list for a tuple and a whole number for a float
    text = json.dumps([content], ensure_ascii=False, default=repr)
    if wrong := _unusable_in(text):
        raise UserError(f"text must be without NUL and halves of surrogate pairs, got {wrong!a}")
    try:
        return _adapter(kind, "ignore" if more else "forbid").validate_json(text)[0]
    except ValidationError as error:
        errors = error.errors(include_url=False)
    # a number that is not finite is text in JSON: such text is made a number where a number must be
    spelt = [
        error["loc"] for error in errors if error["type"] == "float_type" and error["input"] in NOT_FINITE
    ]
    if not spelt:
        unknown = (error for error in errors if error["type"] == _UNKNOWN)
        raise UserError(_refusal(next(unknown, errors[0]), kind, where))
    content = json.loads(text)
    for *outer, last in spelt:
        inner = functools.reduce(lambda place, key: place[key], outer, content)
        inner[last] = float(inner[last])
    return from_plain(kind, content[0], where, more=more)


def _unusable_in(text: str) -> str:
    """Return what of a text of JSON neither UTF-8 nor C can hold; empty if there is nothing."""
    if text.isascii() and "\\u0000" not in text:  # quick, while the pattern begins at every character
        return ""
    wrong = _UNUSABLE.search(text)
    return wrong[0] if wrong else ""


@functools.cache
def _adapter(kind: Any, extra: Literal["ignore", "forbid"] = "forbid") -> Any:
    """Return a validator of one value in a tuple: a dataclass by itself would ignore the configuration.

    Text of limited length must be text that UTF-8 can hold.
    """
    from pydantic import ConfigDict, TypeAdapter

    strict = ConfigDict(strict=True, extra=extra, arbitrary_types_allowed=True, str_max_length=2**31)
    return TypeAdapter(tuple[kind], config=strict)


def _refusal(wrong: Any, kind: Any, where: str) -> str:
    """Return where content is wrong, what is allowed there and what was given."""
    _, *path = wrong["loc"]  # without the place in the tuple of ``_adapter``
    place = functools.reduce(_inside, path, where)
    sort = wrong["type"]
    if sort == _UNKNOWN:
        return f"unknown key {place!r}{nearest(path[-1], _fields(kind, path[:-1]))}"
    if sort == "missing":
        owner = functools.reduce(_inside, path[:-1], where) or kind.__name__
        return f"{owner} lacks {_inside('', path[-1])}; add what is missing"
    if sort == "value_error":
        return f"{place}: {wrong['ctx']['error']}" if place else str(wrong["ctx"]["error"])
    return f"{place or 'the whole'} must be {_allowed(wrong)}, got {_shown(wrong['input'])}"


def _inside(place: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if place else key


def _fields(kind: Any, path: Sequence[str | int]) -> Sequence[str]:
    """Return the fields of the dataclass at a path below ``kind``."""
    kind = _innermost(kind)
    for key in path:
        if dataclasses.is_dataclass(kind):  # keys of lists and dicts are no fields
            kind = _innermost(typing.get_type_hints(kind).get(str(key), kind))
    return [declared.name for declared in dataclasses.fields(kind)]


def _innermost(kind: Any) -> Any:
    """Return the kind of what is in a list, in a dict, or in an optional value."""
    while arguments := typing.get_args(kind):
        kind = next(inner for inner in reversed(arguments) if inner not in (..., types.NoneType))
    return kind


def _allowed(wrong: Any) -> str:
    """Return, in plain words, what is allowed in place of a wrong value."""
    for bound in _BOUNDS.keys() & wrong.get("ctx", {}).keys():
        limit = wrong["ctx"][bound]
        number = f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
        return "finite" if limit == math.inf else f"{_BOUNDS[bound]} {number}"
    words: str = wrong["msg"]
    for theirs, ours in _WORDS.items():
        words = words.replace(theirs, ours)
    if wrong["type"] != "literal_error":
        return words
    close = difflib.get_close_matches(str(wrong["input"]), re.findall(r"'(.+?)'", words), 1)
    return f"one of {words}" + (f" (did you mean {close[0]!r}?)" if close else "")


def _shown(value: object) -> str:
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def from_json(kind: type[T], text: str) -> T:
    """Read a dataclass that ``to_json`` wrote. Raises UserError as ``parsed`` and ``from_plain`` do."""
    return typing.cast("T", from_plain(kind, parsed(text)))


def parsed(text: str) -> Any:
    """Parse JSON. Raises UserError with the error and its place."""
    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"not JSON: {error.msg} in {where}") from error
    except ValueError as error:  # a key twice, or a whole number of thousands of digits
        raise UserError(f"not JSON: {error}") from error
    except RecursionError:
        raise UserError("not JSON: lists or objects inside one another, thousands deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object. Raises UserError for a key that occurs twice: JSON would silently take the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise UserError(f"the key {twice!r} occurs twice in one object; keep one of them")
    return content


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a dataclass, with everything in it, as JSON on one line or indented."""
    return json.dumps(to_plain(value), ensure_ascii=False, indent=indent, allow_nan=False)


def to_plain(value: Any) -> Any:
    """Turn dataclasses and tuples into dicts and lists that JSON can hold."""
    if dataclasses.is_dataclass(value):
        names = [declared.name for declared in dataclasses.fields(value)]
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold a text: not if it has halves of surrogate pairs, as file names may."""
    return not re.search(r"[\ud800-\udfff]", text)
