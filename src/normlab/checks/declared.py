"""Declarations of how the parameters of a model start: from a TOML file, from a mapping, or by a name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from normlab.base.extras import extra_for, what_to_install
from normlab.base.files import read_toml
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
ROLES: Final = tuple("embedding query key value output ffn_in ffn_gate ffn_out head norm".split())
"""Roles of matrices; gains have the role ``norm``. A gate also has the role ``ffn_in``."""
ENTRY: Final = ("std", "value", "depth", "truncated_at")
FORM: Final = (
    "a table has a role or a glob of paths for its name, and std or value, depth and truncated_at: "
    '[ffn_out] with std = 0.02 and depth = "total"'
)
FILE: Final = "declare the deviations by role in a TOML file instead, as in --declared init.toml"
Entries = Mapping[str, Mapping[str, Any]]


def declared(given: str, setup: Setup) -> Setup:
    """Return the setup with what a TOML file declares, or with a recipe as the declaration of its starts.

    Raises UserError for a name that is neither, and for a file that declares anything else.
    """
    if not given.endswith(".toml") and not Path(given).is_file():
        return replace(setup, declare=replace(setup.declare, init=_starts_of_name(given, setup)))
    words, entries = _read_declaration(Path(given))
    own = {name: v for name, v in vars(setup.declare).items() if v is not None and v != ()}
    declare = Declaration.of(own | words)
    if entries:
        declare = replace(declare, init=_resolve_starts(entries, setup, given))
    return replace(setup, declare=declare)


def resolved_init(setup: Setup) -> Setup:
    """Return the setup with a start for each parameter if ``declare["init"]`` names a file or a recipe, or
    maps roles and globs to declarations.
    """
    init = setup.declare.init
    if isinstance(init, Mapping):
        entries = {str(k): v if isinstance(v, Mapping) else {"std": v} for k, v in init.items()}
        starts = _resolve_starts(entries, setup, "declare['init']")
        return replace(setup, declare=replace(setup.declare, init=starts))
    if isinstance(init, (str, Path)) and init != "class":
        return declared(str(init), setup)
    return setup


def _read_declaration(path: Path) -> tuple[dict[str, Any], Entries]:
    """Read from TOML the fields of a ``Declaration``, and a table for each role or glob of parameters."""
    try:
        content = read_toml(path)
    except UserError as error:
        raise UserError(f"{error}; {FORM}") from error
    entries = {name: value for name, value in content.items() if isinstance(value, dict)}
    words = {name: value for name, value in content.items() if name not in entries}
    if "truncated_at" in words:  # of every draw
        most = {"truncated_at": words.pop("truncated_at")}
        entries = {name: (most if "std" in entry else {}) | entry for name, entry in entries.items()}
    known = [f.name for f in fields(Declaration)]
    for name in words:
        if name not in known:
            raise UserError(f"{path} has {name!r}, which declares nothing{nearest(name, known)}; {FORM}")
    return words, entries


@dataclass(frozen=True)
class Place:
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
    def matrix(self) -> bool:
        return len(self.shape) >= 2


def read_places(setup: Setup, *, stream: bool = False) -> tuple[Structure, list[Place]]:
    """Read the residual stream and the parts of all parameters; with ``stream``, the former must work."""
    model, structure = unwrap(setup.model), Structure((), ("nothing was read",))
    call = setup.loss or call_model
    with restored(setup), torch.enable_grad():
        batch = setup.batch
        with nullcontext() if stream else suppress(UserError):
            structure = read_structure(model, batch, call=call)
        subject = Subject(model, batch, setup.loss_of, structure, call=call)
        owned, parts = subject.forward.owned, subject.parts
    layers = {s.name: s.sublayers[-1].layer + 1 for s in structure.stacks}
    places = []
    for path, p in model.named_parameters():
        owner = owned[path]
        layer = layer_of(path) if owner.layer is None else owner.layer
        for part in parts[path]:
            shape = tuple(part.of(p.detach()).shape)
            known = layers.get(owner.stack or "", 0)
            places.append(Place(path, part, shape, owner.stack or "", owner.index, layer, known))
    vocabulary = max((p.shape[0] for p in places if p.part.kind == "embedding" and p.matrix), default=0)
    heads = (p.matrix and p.part.kind == "other" and vocabulary in p.shape for p in places)
    head = ParameterPart("head")
    return structure, [
        replace(p, part=head) if is_head else p for p, is_head in zip(places, heads, strict=True)
    ]


def _resolve_starts(entries: Entries, setup: Setup, where: str) -> tuple[Start, ...]:
    """Return the start of every parameter that an entry fits; the last entry that fits decides.

    A name is a role of matrices (``norm``: of gains), a glob of paths, or both: ``value in *.c_attn.weight``.
    Raises UserError for an entry that says nothing, and for one that fits no parameter.
    """
    for name, entry in entries.items():
        _require_entry(name, entry, where)
    starts, used = list[Start](), set[str]()
    _, places = read_places(setup)
    for place in places:
        fits = [name for name in entries if _fits(name, place)]
        used |= {*fits}
        if fits and (start := _start(entries[fits[-1]], place)) is not None:
            starts.append(start)
    if idle := [name for name in entries if name not in used and name not in ROLES]:
        roles = sorted({p.part.kind for p in places} & {*ROLES})
        raise UserError(
            f"[{idle[0]}] in {where} fits no parameter; the roles here are {', '.join(roles)}, and the paths "
            f"begin {', '.join(p.path for p in places[:4])}"
        )
    return tuple(starts)


def _require_entry(name: str, entry: Mapping[str, Any], where: str) -> None:
    for key, value in entry.items():
        if key not in ENTRY:
            raise UserError(f"[{name}] in {where} has {key!r}{nearest(str(key), ENTRY)}; {FORM}")
        if key == "depth" and value not in DEPTHS:
            raise UserError(f"depth of [{name}] in {where} is {value!r}; it is {', '.join(DEPTHS)}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if key != "depth" and not (number and (key == "value" or value >= 0)):
            raise UserError(f"{key} of [{name}] in {where} is {value!r}; give a number")
    if ("std" in entry) == ("value" in entry):
        raise UserError(f"[{name}] in {where} must say one of std and value; {FORM}")


def _fits(name: str, place: Place) -> bool:
    kind = place.part.kind
    own = kind if place.matrix or (kind == "norm" and not place.path.endswith("bias")) else None
    role, _, where = name.rpartition(" in ")
    return where == own or (role in ("", own) and fnmatchcase(place.path, where))


def _start(entry: Mapping[str, Any], place: Place) -> Start | None:
    if "value" in entry:
        return Start(place.path, value=float(entry["value"]), part=place.part)
    by = {"total": place.layers, "layer": None if place.layer is None else place.layer + 1}
    number = by.get(entry.get("depth", "none"))
    std = float(entry["std"]) / math.sqrt(2 * number) if number else float(entry["std"])
    most = entry.get("truncated_at") if place.matrix else None
    return Start(place.path, std=std, truncated_at=most or None, part=place.part)


def _starts_of_name(name: str, setup: Setup) -> tuple[Start, ...]:
    """Return the starts that a name stands for. Raises UserError if nothing that is installed knows names."""
    for entry in entry_points(group=GROUP):
        try:
            starts: StartsByName = entry.load()
        except ModuleNotFoundError as error:
            if extra := extra_for(error):
                raise UserError(what_to_install(f"the starts of {name!r}", extra)) from error
            raise
        return starts(name, setup)
    raise UserError(f"{name!r} declares nothing: there is no such file; {FORM}")
