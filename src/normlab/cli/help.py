"""What ``--help`` shows: one screen for each command, and the options of recipes on a page of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Final, get_args, get_type_hints

import tyro
from tyro.conf import Suppress, arg

OF_RECIPES: Final = "--help-recipe"
"""What is typed for the page of a recipe's options."""
HIDDEN: Final = get_args(Suppress[Any])[1]
"""The mark of a field that tyro's help leaves out."""
UNTYPED: Final = ("", "''", "None", "False")
"""Defaults, as tyro writes them, that only mean that nothing was typed."""
IsShown = Callable[[str], bool]
"""Whether a page shows the field of this name."""


def print_page_if_asked(name: str, command: Any, words: Sequence[str], default: Any) -> None:
    """Print the page of a command that one of these words asks for, if any, and raise SystemExit.

    ``default`` is the instance that holds the defaults of the command's flags; None if its class does. A
    command with flags of a recipe has a function ``is_of_recipe`` that knows them by their fields.
    """
    is_of_recipe: IsShown | None = getattr(command, "is_of_recipe", None)

    def is_of_command(field: str) -> bool:
        return is_of_recipe is None or not is_of_recipe(field)

    if "-h" in words or "--help" in words:
        more = f"{OF_RECIPES} shows the options of recipes and runs." if is_of_recipe else ""
        _print(name, command, _description(command, more), is_of_command, default)
    elif OF_RECIPES in words and is_of_recipe:
        text = f"Options for a recipe or a run of normlab's; normlab {name} --help shows the others."
        _print(name, command, text, is_of_recipe, default)


def _description(command: Any, more: str) -> str:
    """The docstring of a command, with what may be typed after its first paragraph."""
    summary, _, rest = (inspect.getdoc(command) or "").partition("\n\n")
    _, _, examples = getattr(command, "WHAT", "").partition("\n\n")
    what_to_type = f"Type one of:\n{examples}" if examples else ""  # tyro keeps lines before indented ones
    details = " ".join(filter(None, (rest, more)))
    return "\n\n".join(filter(None, (summary, what_to_type, details)))


def _print(name: str, command: Any, description: str, is_shown: IsShown, default: Any) -> None:
    page = _page(command, is_shown)
    page.__doc__ = description
    given = {} if default is None else {"default": _like(page, default)}
    tyro.cli(page, prog=f"normlab {name}", args=["--help"], config=(tyro.conf.DisallowNone,), **given)


def _page(kind: Any, is_shown: IsShown) -> Any:
    """Return a class with the fields of a command, or of a section of flags, of which tyro shows some.

    It is a subclass that declares every field anew, because tyro reads from a field's annotation whether it
    is shown and how its default is written.
    """
    hints = get_type_hints(kind, include_extras=True)
    annotations: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for f in fields(kind):
        hint, marks = hints[f.name], list[Any]()
        if hasattr(hint, "__metadata__"):
            hint, *marks = get_args(hint)
        if is_dataclass(hint):  # a section, whose fields are flags as the command's own
            names = _names(hint)
            hint = _page(hint, is_shown)
            if not all(map(is_shown, names)):
                hint.__doc__ = ""  # it describes the section with all its fields
            if f.default is not MISSING:
                defaults[f.name] = _like(hint, f.default)
        else:
            names = [f.name]
            marks.append(arg(help_behavior_hint=_default))
        if not any(map(is_shown, names)):
            marks.append(HIDDEN)
        annotations[f.name] = Annotated[hint, *marks] if marks else hint
    body = {"__annotations__": annotations, "__doc__": kind.__doc__, **defaults}
    return dataclass(frozen=True, kw_only=True)(type(kind.__name__, (kind,), body))


def _names(kind: Any) -> list[str]:
    """The fields of a class, and those of its sections instead of the sections."""
    names: list[str] = []
    for f in fields(kind):
        hint = get_type_hints(kind)[f.name]
        names += _names(hint) if is_dataclass(hint) else [f.name]
    return names


def _like(page: Any, default: Any) -> Any:
    """Return an instance of a page's class with the values of an instance of the command's."""
    hints = get_type_hints(page)
    values = {}
    for f in fields(default):
        value = getattr(default, f.name)
        values[f.name] = _like(hints[f.name], value) if is_dataclass(hints[f.name]) else value
    return page(**values)


def _default(value: str) -> str:
    return "" if value in UNTYPED else f"(default: {value})"
