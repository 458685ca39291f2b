"""Declarations about a model: how its parameters should start, from a file or a recipe, and a baseline, an
earlier version from which its parameters must not differ.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.checks.property import Violation
from normlab.config.config import Config, ModelConfig
from normlab.diagnosis import Structure, read_structure
from normlab.diagnosis.block import layer_of
from normlab.diagnosis.subject import Subject
from normlab.errors import UserError, nearest
from normlab.nn import Branch, TokenModel
from normlab.nn.site import DECODER_LAYER, ENCODER_LAYER
from normlab.nn.sublayer import Sublayer
from normlab.runs.files import read_json
from normlab.tasks.task import build_model
from normlab.trace.setup import Declaration, Setup
from normlab.trace.starts import ParameterPart, Start
from normlab.trace.tensors import call_model, unwrap
from normlab.training.recipes.grammar import MODELS, resolve

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
        return replace(setup, declare=replace(setup.declare, init=_starts_of_recipe(given, setup)))
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
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}; {FORM}") from error
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
class _Place:
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


def _read(setup: Setup, *, stream: bool = False) -> tuple[Structure, list[_Place]]:
    """Read the residual stream and the parts of all parameters; with ``stream``, the former must work."""
    model, batch, structure = deepcopy(unwrap(setup.model)), setup.batch, Structure((), ("nothing was read",))
    call = setup.loss or call_model
    with torch.enable_grad():
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
            places.append(_Place(path, part, shape, owner.stack or "", owner.index, layer, known))
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
    _, places = _read(setup)
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


def _fits(name: str, place: _Place) -> bool:
    kind = place.part.kind
    own = kind if place.matrix or (kind == "norm" and not place.path.endswith("bias")) else None
    role, _, where = name.rpartition(" in ")
    return where == own or (role in ("", own) and fnmatchcase(place.path, where))


def _start(entry: Mapping[str, Any], place: _Place) -> Start | None:
    if "value" in entry:
        return Start(place.path, value=float(entry["value"]), part=place.part)
    by = {"total": place.layers, "layer": None if place.layer is None else place.layer + 1}
    number = by.get(entry.get("depth", "none"))
    std = float(entry["std"]) / math.sqrt(2 * number) if number else float(entry["std"])
    most = entry.get("truncated_at") if place.matrix else None
    return Start(place.path, std=std, truncated_at=most or None, part=place.part)


def _starts_of_recipe(recipe: str, setup: Setup) -> tuple[Start, ...]:
    """Return the starts of a model's matrices if it were initialised as a recipe with its layers, widths and
    vocabulary. Raises UserError for a recipe that does not exist, and if these sizes cannot be read.
    """
    try:
        resolve(recipe, Config())
    except UserError as error:
        raise UserError(
            f"{recipe!r} declares nothing: it is neither a file nor a recipe that is defined: {error}"
        ) from error
    structure, places = _read(setup, stream=True)
    sizes, stacks, table = _sizes(structure, places)
    config = resolve(recipe, replace(Config(), model=sizes)).model
    kind = MODELS[bool(config.encoder_layers), bool(config.decoder_layers)]
    drawn = dict(_draws(build_model(kind, config, max(table.shape), 0)))
    keys = [(p, (stacks[p.stack], p.index, p.part.kind)) for p in places if p.matrix and p.stack]
    return tuple(
        Start(p.path, std=size, entries=n, part=p.part)
        for p, key in [*keys, (table, ("", 0, "embedding"))]
        if key in drawn
        for size, n in [drawn[key]]
    )


def _draws(model: TokenModel) -> Iterator[tuple[tuple[str, int | None, str], tuple[float, int]]]:
    """Yield size and number of entries of each matrix of one of our models, by stack, sublayer and role."""
    for m in model.modules():
        if isinstance(m, Sublayer) and isinstance(f := m.f, Branch):
            for name, weight in f.matrices().items():
                yield (m.site.stack, m.site.index, name), _size(weight)
    yield ("", 0, "embedding"), _size(model.embedding.vectors())


def _size(x: Tensor) -> tuple[float, int]:
    return x.detach().double().square().mean().sqrt().item(), x.numel()


def _sizes(structure: Structure, places: Sequence[_Place]) -> tuple[ModelConfig, dict[str, str], _Place]:
    """Return the widths and layers of any model, from its residual streams and the shapes of its matrices;
    our name of each stack, where a single one is a decoder; and the largest table of embeddings.

    Keys and values get one head, which changes no shape.
    """
    tables = [p for p in places if p.part.kind == "embedding" and p.matrix]
    if not tables:
        raise UserError(f"the model has no embedding matrix, whose rows are the vocabulary; {FILE}")
    table = max(tables, key=lambda p: max(p.shape))
    dim, every = min(table.shape), sum(s.sublayers[-1].layer + 1 for s in structure.stacks)

    def width(role: str) -> int:
        shapes = [p.shape for p in places if p.matrix and p.stack and p.part.kind == role]
        widths = {shape[shape[0] == dim] for shape in shapes if len(shape) == 2 and dim in shape}
        if len(widths) != 1 or len(shapes) < every:
            raise UserError(
                f"the model shows no {role} matrices of one width beside the stream's {dim}, but "
                f"{', '.join(sorted({'×'.join(map(str, s)) for s in shapes})) or 'none'}; {FILE}"
            )
        return widths.pop()

    query, key = width("query"), width("key")
    names = ["decoder"] if len(structure.stacks) == 1 else ["encoder", "decoder"]
    wanted = {"encoder": ENCODER_LAYER, "decoder": DECODER_LAYER if len(names) == 2 else ENCODER_LAYER}
    stacks = dict(zip((s.name for s in structure.stacks), names, strict=False))
    layers = dict.fromkeys(wanted, 0)
    for stack in structure.stacks:
        own, name = stack.sublayers[-1].layer + 1, stacks.get(stack.name)
        if name is None or len(stack.sublayers) != own * len(wanted[name]):
            raise UserError(
                f"the {len(stack.sublayers)} sublayers in {own} layers of {stack.name!r} are not "
                f"those of an encoder, a decoder or both; {FILE}"
            )
        layers[name] = own
    config = replace(
        Config().model,
        dim=dim,
        ffn_dim=width("ffn_out"),
        heads=query // key if query % key == 0 else 1,
        kv_heads=1,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
    )
    return config, stacks, table


Baseline = Mapping[str, Mapping[str, Any]]
"""What a baseline keeps of each parameter, by path."""
KEPT: Final = ("shape", "dtype", "trainable", "tied")
ADVICE: Final = "if this is meant, write a new baseline: --json > baseline.json"


def parameters_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return shape, type, size and tie of every parameter; ``tied`` is the first path at which it occurs."""
    first: dict[int, str] = {}
    return {
        path: {
            "shape": list(p.shape),
            "dtype": str(p.dtype).removeprefix("torch."),
            "trainable": p.requires_grad,
            "tied": "" if (own := first.setdefault(id(p), path)) == path else own,
            "rms": float(p.detach().double().square().mean().sqrt()) if p.numel() else 0.0,
        }
        for path, p in model.named_parameters(remove_duplicate=False)
        if not p.is_complex()
    }


def read_baseline(path: Path) -> Baseline:
    """Read the parameters from the JSON of a check. Raises UserError if it has none."""
    content = read_json(path)
    rows = content.get("parameters") if isinstance(content, dict) else None
    form = isinstance(rows, dict) and all(
        isinstance(row, dict) and {*KEPT, "rms"} <= row.keys() and isinstance(row["rms"], (int, float))
        for row in rows.values()
    )
    if not form or not rows:
        raise UserError(
            f"{path} holds no parameters of a check; write one: normlab check … --json > {path.name}"
        )
    return rows


def changed_parameters(model: nn.Module, before: Baseline) -> Iterator[Violation]:
    """Name what differs from a baseline, grouping parameters that differ in the same way. Draws from another
    seed do not count as different.
    """
    groups: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for path, what, how in _differences(model, before):
        groups[".".join("*" if part.isdecimal() else part for part in path.split(".")), what].append(
            (path, how)
        )
    for changes in groups.values():
        path, how = changes[0]
        others = f", and {len(changes) - 1} others like it" if len(changes) > 1 else ""
        yield Violation("baseline", path, f"{how}{others}", ADVICE)


def _differences(model: nn.Module, before: Baseline) -> Iterator[tuple[str, str, str]]:
    now, parameters = parameters_of(model), dict(model.named_parameters(remove_duplicate=False))
    for path in dict.fromkeys([*now, *before]):
        if path not in before or path not in now:
            yield path, "there", "it is new" if path in now else "it is missing"
            continue
        old, new = before[path], now[path]
        for name in KEPT:
            if old[name] != new[name]:
                yield path, name, f"its {name} was {old[name] or 'none'}, and is {new[name] or 'none'}"
        if old["shape"] == new["shape"]:
            start = Start(path, std=float(old["rms"]), entries=parameters[path].numel())
            if how := start.difference(parameters[path], len(now)):
                yield path, "rms", how.replace("is declared", "was its size in the baseline")
