"""Find the lines of a running script, and its names for tensors and modules, by looking at its frames."""

from __future__ import annotations

import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from normlab.base.libraries import is_library
from normlab.trace.reach import NEVER, attributes_of, is_of_user

LARGEST_COLLECTION: Final = 64
"""Entries of the largest list in which names of a batch's tensors are looked for."""
RUNNING_SCRIPTS: Final = "<frozen runpy>"
"""The file name of the code that runs a script: none of the frames further out are the script's."""
_NORMLAB: Final = f"{Path(__file__).parents[1]}{os.sep}"


def calling_line() -> str:
    """Return the file and line of the user's code that is running: ``train.py:42``."""
    for frame in _frames():
        if not is_library(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return ""


def _frames() -> Iterator[FrameType]:
    """Yield the frames that are running outside of normlab, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NORMLAB):
            yield frame
        frame = frame.f_back


class Names:
    """What a script calls its tensors and modules, as far as its variables show it."""

    def __init__(self) -> None:
        self.of_tensors: dict[int, str] = {}
        """By the number of the value."""
        self.of_modules: dict[int, str] = {}
        """By ``id``."""

    def look(self, number_of: Callable[[Any], int | None]) -> None:
        """Note the names that are in use now. The innermost frame that has one for a value decides.

        ``number_of`` gives the number of a value; None for what is not a value.
        """
        for frame in _frames():
            if frame.f_code.co_filename == RUNNING_SCRIPTS:
                break
            is_of_script = not is_library(frame.f_code.co_filename)
            for name, value in frame.f_locals.items():
                kind = type(value)
                if kind in NEVER or (kind is ModuleType and not is_of_user(value.__name__)):
                    continue  # most of what a script imports, and nothing of its own
                self._note_modules(name, value)
                if not name.startswith("__"):
                    self._note_tensors(name, value, number_of, is_of_script=is_of_script)

    def _note_modules(self, name: str, value: Any) -> None:
        # an object's modules too: a trainer's are its attributes, in a library's frames as well
        values = {name: value, **(attributes_of(value) or {})}
        for attribute, module in values.items():
            # by its type: asking an object for its class may run code of its own
            if issubclass(type(module), nn.Module) and attribute != "self":
                self.of_modules.setdefault(id(module), attribute)

    def _note_tensors(
        self, name: str, value: Any, number_of: Callable[[Any], int | None], *, is_of_script: bool
    ) -> None:
        for key, tensor in named_tensors(value):
            number = number_of(tensor)
            if number is None:
                continue
            if key:
                self.of_tensors.setdefault(number, key)
            elif is_of_script:  # a library's own variables say little, but keys of its batches do
                self.of_tensors.setdefault(number, name)


def named_tensors(value: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a variable, each with its key in a mapping.

    Large collections are left out, since they are stores of data, and so are other objects: asking for their
    items may run code of their own, such as imports.
    """
    kind: type[Any] = type(value)
    if kind in NEVER:
        return
    if issubclass(kind, Tensor):
        yield key, value
    elif kind in (list, tuple) and len(value) <= LARGEST_COLLECTION:
        for item in value:
            yield from named_tensors(item)
    elif (kind is dict or issubclass(kind, UserDict)) and len(value) <= LARGEST_COLLECTION:
        for name, item in value.items():
            yield from named_tensors(item, name if isinstance(name, str) else "")
