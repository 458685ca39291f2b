"""Read what is declared of a step from a TOML file, and how parameters are declared to start.

A start is declared by the kind of a matrix, by a glob of paths, or by the name of a recipe. Kinds are read as
a diagnosis reads them, from the residual stream of one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from normlab.base.extras import extra_for, what_to_install
from normlab.base.files import read_toml
from normlab.base.roles import MATRIX_KINDS
from normlab.diagnosis import Structure, read_structure
from normlab.diagnosis.containers import layer_of
from normlab.diagnosis.subject import Subject
from normlab.errors import UserError, nearest
from normlab.setups.setup import Declaration, Setup
from normlab.trace.restore import restored
from normlab.trace.starts import ParameterPart, Start
from normlab.trace.tensors import call_model, unwrap

StartsByName: TypeAlias = Callable[[str, Setup], tuple[Start, ...]]
"""``starts(name, setup)``: how parameters start in what a name stands for, such as a recipe; raises UserError
for a name that stands for nothing.
"""
GROUP: Final = "normlab.starts"
"""The group of entry points that hold a ``StartsByName``: whoever knows names registers one, so that a check
need not import the laboratory, which knows recipes.
"""
DEPTHS: Final = ("none", "total", "layer")
KINDS: Final = ("embedding", *MATRIX_KINDS, "ffn_gate", "head", "norm")
"""The kinds of parameters (``trace.starts.ParameterPart``) that a table may name: matrices by what they are
in their layer, and the gains of norms. A gate is of the kind ``ffn_in``, too: ``ffn_gate`` may fit nothing.
"""
ENTRY: Final = ("std", "value", "depth", "truncated_at")
FORM: Final = (
    "a table has a kind of matrix or a glob of paths for its name, and std or value, depth and truncated_at: "
    '[ffn_out] with std = 0.02 and depth = "total"'
)
FILE: Final = "declare the deviations by kind of matrix in a TOML file instead, as in --declared init.toml"
Entries = Mapping[str, Mapping[str, Any]]
"""What is declared, by kind of matrix, by glob of paths, or by both."""


def declared(file_or_name: str, setup: Setup) -> Setup:
    """Return the setup with what a TOML file declares, or with a recipe as the declaration of its starts.

    Args:
        file_or_name: the path of a file, or the name of a recipe.
        setup: the setup; what it declares already is kept, unless the file says otherwise.

    Raises UserError for a name that is neither, and for a file that declares anything else.
    """
    if not file_or_name.endswith(".toml") and not Path(file_or_name).is_file():
        return replace(setup, declare=replace(setup.declare, init=_starts_of_name(file_or_name, setup)))
    words, entries = _read_declaration(Path(file_or_name))
    before = {name: v for name, v in vars(setup.declare).items() if v is not None and v != ()}
    declare = Declaration.of(before | words)
    if entries:
        declare = replace(declare, init=_resolve_starts(entries, setup, file_or_name))
    return replace(setup, declare=declare)


def resolved_init(setup: Setup) -> Setup:
    """Return the setup with a start for each parameter if ``declare["init"]`` names a file or a recipe, or
    maps kinds and globs to declarations.
    """
    init = setup.declare.init
    if isinstance(init, Mapping):
        # a plain number is a deviation: {"ffn_out": 0.02}
        entries = {str(k): v if isinstance(v, Mapping) else {"std": v} for k, v in init.items()}
        starts = _resolve_starts(entries, setup, "declare['init']")
        return replace(setup, declare=replace(setup.declare, init=starts))
    if isinstance(init, (str, Path)) and init != "class":
        return declared(str(init), setup)
    return setup


def _read_declaration(path: Path) -> tuple[dict[str, Any], Entries]:
    """Read from TOML the fields of a ``Declaration``, and a table for each kind or glob of parameters."""
    try:
        content = read_toml(path)
    except UserError as error:
        raise UserError(f"{error}; {FORM}") from error
    entries = {name: value for name, value in content.items() if isinstance(value, dict)}
    words = {name: value for name, value in content.items() if name not in entries}
    if "truncated_at" in words:  # of every draw that has none of its own
        of_every_draw = {"truncated_at": words.pop("truncated_at")}
        for name, entry in entries.items():
            if "std" in entry:
                entries[name] = of_every_draw | entry
    allowed = [field.name for field in fields(Declaration)]
    for name in words:
        if name not in allowed:
            raise UserError(f"{path} has {name!r}, which declares nothing{nearest(name, allowed)}; {FORM}")
    return words, entries


@dataclass(frozen=True)
class PlacedPart:
    """A parameter, or one part of it, and where it stands in its stack."""

    path: str
    part: ParameterPart
    shape: tuple[int, ...]
    stack: str
    index: int | None
    layer: int | None
    layers: int
    """Number of layers in the stack."""

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) >= 2


def read_parts(setup: Setup, *, stream: bool = False) -> tuple[Structure, list[PlacedPart]]:
    """Read the residual stream and the parts of all parameters.

    Args:
        setup: the setup, of which one pass is run.
        stream: whether the residual stream must be found. Without one, parts are known by their names alone.

    Raises UserError if it must be found, and is not.
    """
    model, structure = unwrap(setup.model), Structure((), ("nothing was read",))
    call = setup.loss or call_model
    with restored(setup), torch.enable_grad():
        batch = setup.batch
        with nullcontext() if stream else suppress(UserError):
            structure = read_structure(model, batch, call=call)
        subject = Subject(model, batch, setup.loss_of, structure, call=call)
        owned, parts_of = subject.forward.owned, subject.parts
    layers_of = {stack.name: stack.sublayers[-1].layer + 1 for stack in structure.stacks}
    parts: list[PlacedPart] = []
    for path, p in model.named_parameters():
        owner = owned[path]
        stack = owner.stack or ""
        layer = layer_of(path) if owner.layer is None else owner.layer
        for part in parts_of[path]:
            shape = tuple(part.of(p.detach()).shape)
            parts.append(PlacedPart(path, part, shape, stack, owner.index, layer, layers_of.get(stack, 0)))
    return structure, _with_heads(parts)


def _with_heads(parts: Sequence[PlacedPart]) -> list[PlacedPart]:
    """Return the parts, where a matrix of no other kind that is as long as the vocabulary is the head."""
    tables = [part for part in parts if part.part.kind == "embedding" and part.is_matrix]
    vocabulary = max((table.shape[0] for table in tables), default=0)
    named: list[PlacedPart] = []
    for part in parts:
        is_head = part.is_matrix and part.part.kind == "other" and vocabulary in part.shape
        named.append(replace(part, part=ParameterPart("head")) if is_head else part)
    return named


def _resolve_starts(entries: Entries, setup: Setup, where: str) -> tuple[Start, ...]:
    """Return the start of every parameter that an entry fits; the last entry that fits decides.

    A name is a kind of matrix (``norm``: of gains), a glob of paths, or both: ``value in *.c_attn.weight``.
    Raises UserError for an entry that says nothing, and for one that fits no parameter.
    """
    for name, entry in entries.items():
        _require_entry(name, entry, where)
    starts, used = list[Start](), set[str]()
    _, parts = read_parts(setup)
    for part in parts:
        fitting = [name for name in entries if _fits(name, part)]
        used |= {*fitting}
        if fitting:
            starts.append(_start(entries[fitting[-1]], part))
    # a kind may be declared for models of which this one is not: one without gates has no ffn_gate
    idle = [name for name in entries if name not in used and name not in KINDS]
    if idle:
        kinds = sorted({part.part.kind for part in parts} & {*KINDS})
        raise UserError(
            f"[{idle[0]}] in {where} fits no parameter; the kinds here are {', '.join(kinds)}, and the paths "
            f"begin {', '.join(part.path for part in parts[:4])}"
        )
    return tuple(starts)


def _require_entry(name: str, entry: Mapping[str, Any], where: str) -> None:
    """Raise UserError for words and values that an entry cannot have."""
    for key, value in entry.items():
        if key not in ENTRY:
            raise UserError(f"[{name}] in {where} has {key!r}{nearest(str(key), ENTRY)}; {FORM}")
        if key == "depth":
            if value not in DEPTHS:
                raise UserError(f"depth of [{name}] in {where} is {value!r}; it is {', '.join(DEPTHS)}")
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (key != "value" and value < 0):
            raise UserError(f"{key} of [{name}] in {where} is {value!r}; give a number")
    if ("std" in entry) == ("value" in entry):
        raise UserError(f"[{name}] in {where} must say one of std and value; {FORM}")


def _fits(name: str, part: PlacedPart) -> bool:
    """Return whether an entry of this name is meant for a part."""
    kind = part.part.kind
    is_gain = kind == "norm" and not part.path.endswith("bias")
    kind_it_may_be_called = kind if part.is_matrix or is_gain else None
    kind_of_entry, _, where = name.rpartition(" in ")
    if where == kind_it_may_be_called:
        return True
    return kind_of_entry in ("", kind_it_may_be_called) and fnmatchcase(part.path, where)


def _start(entry: Mapping[str, Any], part: PlacedPart) -> Start:
    """Return the start that an entry declares.

    Two branches a layer add to the stream, so that a stack of N layers sums 2 N of them: dividing their
    deviation by √(2 N) keeps the stream's size (Radford et al. 2019, Section 2.3).
    """
    if "value" in entry:
        return Start(part.path, value=float(entry["value"]), part=part.part)
    layers = {"total": part.layers, "layer": None if part.layer is None else part.layer + 1}
    number = layers.get(entry.get("depth", "none"))
    std = float(entry["std"]) / math.sqrt(2 * number) if number else float(entry["std"])
    truncated_at = entry.get("truncated_at") if part.is_matrix else None
    return Start(part.path, std=std, truncated_at=truncated_at or None, part=part.part)


def _starts_of_name(name: str, setup: Setup) -> tuple[Start, ...]:
    """Return the starts that a name stands for, by the first of those who know names that takes it.

    Raises UserError, with why each refuses it, if none does.
    """
    refusals = list[UserError]()
    for entry in entry_points(group=GROUP):
        try:
            return _loaded_starts(entry, name)(name, setup)
        except UserError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    sentences = [str(error) for error in refusals] or ["there is no such file"]
    raise UserError(f"{name!r} declares nothing: {'; '.join(sentences)}; {FORM}")


def _loaded_starts(entry: EntryPoint, name: str) -> StartsByName:
    """Return what an entry point holds. Raises UserError if it needs an extra that is not installed."""
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if extra := extra_for(error):
            raise UserError(what_to_install(f"the starts of {name!r}", extra)) from error
        raise
