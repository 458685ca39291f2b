"""Find the objects of a process that hold a value.

After a block of a notebook was recorded, numbers that were followed in it must become plain ones, and
trainers must be what they were. No path leads from a block of code to everything that it has changed. So the
garbage collector is asked, which knows what refers to what.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CellType
from typing import Any, Final

from normlab.setups.numbers import FollowedFloat, FollowedInt, unfollowed
from normlab.trace.reach import Kind, attributes_of, entries_of, kind_of, slots_of

FOLLOWED: Final = {FollowedFloat, FollowedInt}
AT_ONCE: Final = 1_000
"""How many objects' contents are looked at together: most groups of objects hold no followed number, and are
passed over after one call.
"""


class PlainArithmetic:
    """Stands in as the recorder of numbers that are no longer followed: operations give plain ones."""

    def compute(self, operation: Callable[..., Any], *numbers: Any) -> Any:
        """Return the result of an operation as a plain number."""
        return operation(*map(unfollowed, numbers))

    def convert(self, kind: type, number: Any) -> Any:
        """Return a number as a plain ``float`` or ``int``."""
        return kind(unfollowed(number))


def make_numbers_plain() -> None:
    """Replace the numbers that were followed while a block was recorded by plain ones in all that holds them:
    attributes, lists, mappings, sets and tuples.

    A local variable of a function that runs keeps its number, which equals the plain one and computes alike.
    """
    arithmetic, new = PlainArithmetic(), dict[int, Any]()
    holders, numbers = _holders_of_numbers()
    for number in numbers:
        number.recorder = arithmetic
        new[id(number)] = unfollowed(number)
    old = numbers  # held on to, so that no other object gets an id among these
    while new:
        tuples = list[Any]()
        for holder in holders:
            if isinstance(holder, tuple):
                tuples.append(holder)
            elif holder is not old:
                _replace_in(holder, new)
        # a tuple cannot be changed: another one takes its place in all that holds it
        old, new = tuples, {id(holder): _tuple_with(holder, new) for holder in tuples}
        holders = gc.get_referrers(*tuples)


def _holders_of_numbers() -> tuple[list[Any], list[Any]]:
    """Return the objects that refer to followed numbers, and these numbers."""
    holders, numbers, everything = list[Any](), list[Any](), gc.get_objects()
    for begin in range(0, len(everything), AT_ONCE):
        objects = everything[begin : begin + AT_ONCE]
        if not FOLLOWED.isdisjoint(map(type, objects)):
            numbers += [x for x in objects if type(x) in FOLLOWED]
        if not FOLLOWED.isdisjoint(map(type, gc.get_referents(*objects))):
            holders += [x for x in objects if not FOLLOWED.isdisjoint(map(type, gc.get_referents(x)))]
    return holders, numbers


def _tuple_with(entries: tuple[Any, ...], new: Mapping[int, Any]) -> tuple[Any, ...]:
    make: Callable[..., Any] = getattr(type(entries), "_make", type(entries))  # a named tuple has its own
    return make([new.get(id(entry), entry) for entry in entries])


def _replace_in(holder: Any, new: Mapping[int, Any]) -> None:
    """Put new values in place of the old ones, given by their ``id``, in a container or in attributes."""
    if isinstance(holder, dict):
        for key, value in list(dict.items(holder)):
            if id(value) in new:
                holder[key] = new[id(value)]
    elif isinstance(holder, (list, deque)):
        for place, value in enumerate(entries_of(holder)):
            if id(value) in new:
                holder[place] = new[id(value)]
    elif isinstance(holder, set):
        old = [value for value in entries_of(holder) if id(value) in new]
        holder.difference_update(old)
        holder.update(new[id(value)] for value in old)
    elif isinstance(holder, CellType):
        holder.cell_contents = new[id(holder.cell_contents)]
    else:
        _replace_attributes(holder, new)


def _replace_attributes(owner: Any, new: Mapping[int, Any]) -> None:
    _replace_in(attributes_of(owner) or {}, new)
    for slot in slots_of(type(owner)):
        with suppress(AttributeError, KeyError):  # nothing is in it, or another value
            slot.__set__(owner, new[id(slot.__get__(owner))])


def owners_of(values: list[Any]) -> list[Any]:
    """Return the objects of the process that have one of these values as an attribute, such as a trainer; not
    modules and other objects of torch.
    """
    holders = gc.get_referrers(*values)
    # the attributes of an object may lie in a dict, which holds them then
    tables = [holder for holder in holders if type(holder) is dict]
    holders += gc.get_referrers(*tables)
    wanted = {id(value) for value in values}
    owners = dict[int, Any]()
    for holder in holders:
        if kind_of(type(holder)) is Kind.OBJECT:
            attributes = attributes_of(holder) or {}
            if any(id(value) in wanted for value in attributes.values()):
                owners[id(holder)] = holder
    return list(owners.values())
