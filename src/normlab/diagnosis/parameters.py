"""Assign parameters to sublayers by the graph of a pass, and recognise their function (query, norm …)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from normlab.diagnosis.block import ATTENTION, FFN
from normlab.diagnosis.norms import Norms
from normlab.diagnosis.structure import Structure
from normlab.trace.autograd import nodes_behind
from normlab.trace.restore import undisturbed
from normlab.trace.starts import ParameterPart
from normlab.trace.tensors import Tap, activations, first_calls

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Width: TypeAlias = tuple[int, int]
"""Widths of the input and the output of a module's first call."""
EMBEDDING = re.compile(r"embed|position|\bw[tp]e\b", re.IGNORECASE)
PACKED: Final = frozenset({"qkv", "wqkv", "kv", "wkv", "in_proj", "in_proj_weight", "c_attn"})
PROJECTIONS: Final = {
    "query": frozenset({"q", "wq", "query", "queries"}),
    "key": frozenset({"k", "wk", "key", "keys"}),
    "value": frozenset({"v", "wv", "value", "values"}),
}
OUTPUT: Final = frozenset({"o", "wo", "out", "output", "proj", "dense"})
FFN_OUT: Final = frozenset({"down", "out", "outer", "output", "wo", "w2", "fc2", "lin2"})
FFN_IN: Final = frozenset({"up", "gate", "in", "inner", "wi", "w1", "w3", "fc1", "lin1"})


class Owner(NamedTuple):
    """The place where a parameter acts. If several sublayers use it, ``role`` is ``shared`` and ``index`` is
    None, as is ``layer`` unless they are in one layer, and ``stack`` unless they are in one stack. Outside
    all sublayers, ``role`` is ``other``.
    """

    stack: str | None = None
    index: int | None = None
    layer: int | None = None
    role: str = "other"


def owners(model: nn.Module, structure: Structure, seen: Mapping[Tap, Tensor]) -> dict[str, Owner]:
    """Return the owner of every parameter by path.

    A sublayer owns the parameters between the stream before it and the stream after it: those of its branch,
    its norms and its factors. ``seen`` holds what sublayers tap, from one forward pass with its graph.
    Parameters that need no gradient are not in the graph and are ``other``.
    """
    uses: dict[str, list[Owner]] = {path: [] for path, _ in model.named_parameters()}
    path_of = {id(parameter): path for path, parameter in model.named_parameters()}
    finals = tuple(f"{stack.final_norm}." for stack in structure.stacks if stack.final_norm)
    ends = {seen[t].grad_fn for _, v in structure.sublayers for t in (v.before, v.branch, v.after)}
    for stack, view in structure.sublayers:
        before, branch, after = (seen[tap].grad_fn for tap in (view.before, view.branch, view.after))
        # the way back ends at every tensor of the stream but passes through this sublayer's own
        inside = {after, branch} - {before}
        for node in nodes_behind(after, ends - inside):
            path = path_of.get(id(getattr(node, "variable", None)), "")
            if path and not path.startswith(finals):
                uses[path].append(Owner(stack, view.index, view.layer, view.role))
    return {path: _joint(users) for path, users in uses.items()}


def _joint(users: list[Owner]) -> Owner:
    """Return the owner of a parameter that these sublayers use."""
    if not users:
        return Owner()
    if len(users) == 1:
        return users[0]
    stacks = {owner.stack for owner in users}
    layers = {(owner.stack, owner.layer) for owner in users}
    stack = users[0].stack if len(stacks) == 1 else None
    layer = users[0].layer if len(layers) == 1 else None
    return Owner(stack, None, layer, "shared")


Parts: TypeAlias = tuple[ParameterPart, ...]


def measuring(model: nn.Module) -> AbstractContextManager[dict[str, Width]]:
    """Fill the dictionary with the widths at modules that hold parameters, in the order of their calls."""
    holders = {
        path: module
        for path, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    return first_calls(holders, _width)


def _width(values: Any) -> int | None:
    """Return the last dimension of the first activation among a call's arguments or outputs."""
    return next((x.shape[-1] for _, x in activations(values)), None)


def norms_of(model: nn.Module, widths: Mapping[str, Width]) -> set[str]:
    """Return the measured modules whose output does not grow with their input, by path."""
    norms = Norms(model)
    with undisturbed(model), torch.no_grad():
        return {
            path for path, (given, output) in widths.items() if given == output and norms.is_norm(path, given)
        }


def kinds(
    model: nn.Module, owned: Mapping[str, Owner], widths: Mapping[str, Width], dims: Mapping[str | None, int]
) -> dict[str, Parts]:
    """Return the parts of every parameter by path: query, key, value, output, ffn_in, ffn_out, norm,
    embedding, other.

    ``owned`` says in which sublayer a parameter acts, ``widths`` what its module maps from and to, ``dims``
    how wide each stack's stream is. A packed matrix of queries, keys and values has three parts, one of keys
    and values two, if its name is known and its size fits the other matrices of its sublayer; one packed head
    by head is ``other``. A gate of a feed-forward sublayer is ``ffn_in``; a bias has the kind of its matrix.
    """
    modules, norms = dict(model.named_modules()), norms_of(model, widths)
    shapes = {path: tuple(p.shape) for path, p in model.named_parameters()}
    alone = {  # what a parameter's own name and module say
        path: "norm" if _holder(path) in norms else _kind(path, shape, modules[_holder(path)], owned[path])
        for path, shape in shapes.items()
    }
    tables = {shape for path, shape in shapes.items() if alone[path] == "embedding" and len(shape) == 2}
    together: dict[Owner, dict[str, str]] = defaultdict(dict)
    for path, owner in owned.items():
        together[owner][path] = alone[path]
    parts: dict[str, Parts] = {}
    for path, kind in alone.items():
        dim, beside = dims.get(owned[path].stack), together[owned[path]]
        if kind == "packed":
            parts[path] = _unpacked(shapes, path, beside, width=widths.get(_holder(path)), dim=dim)
        elif kind == "ffn":
            matrices = [other for other, kind_of_other in beside.items() if kind_of_other == "ffn"]
            parts[path] = (ParameterPart(_ffn(shapes, path, matrices, widths, dim=dim)),)
        else:
            tied = kind == "other" and shapes[path] in tables  # an output projection like the embedding
            parts[path] = (ParameterPart("embedding" if tied else kind),)
    for path, shape in shapes.items():
        if len(shape) == 1 and path.endswith("bias") and alone[path] != "norm":
            parts[path] = _like_matrix(shapes, parts, path)
    return parts


def _holder(path: str) -> str:
    return path.rpartition(".")[0]


def _kind(path: str, shape: tuple[int, ...], module: nn.Module, owner: Owner) -> str:
    """Classify a parameter by type and name; ``packed`` and ``ffn`` leave it to other parameters."""
    if isinstance(module, nn.Embedding):
        return "embedding"
    if len(shape) < 2:
        return "other"
    if owner.role == "other":
        return "embedding" if EMBEDDING.search(f"{path} {type(module).__name__}") else "other"
    if owner.role.endswith("attention") or (owner.role in ("shared", "branch") and ATTENTION.search(path)):
        return _projection(path)
    return "ffn" if owner.role == "ffn" or FFN.search(path) else "other"


def _names(path: str) -> list[str]:
    """Return the last two names of a path that say something, the last one first."""
    names = [
        name for name in path.lower().split(".") if not name.isdigit() and name not in ("weight", "bias")
    ]
    return names[:-3:-1]


def _projection(path: str) -> str:
    for name in _names(path):
        words = set(name.split("_"))
        if name in PACKED or words & PACKED:
            return "packed"
        kinds = [kind for kind, known in PROJECTIONS.items() if words & known]
        if kinds:
            return kinds[0] if len(kinds) == 1 else "other"
        if words & OUTPUT:
            return "output"
    return "other"


def _unpacked(
    shapes: Shapes, path: str, beside: Mapping[str, str], *, width: Width | None, dim: int | None
) -> Parts:
    """Return the parts of a packed matrix: queries, unless they have a matrix of their own, keys and values.

    Keys and values are as wide as each other, so the width of the queries tells all three. ``beside`` has the
    kinds of all parameters of its sublayer, ``width`` what its module maps from and to, and ``dim`` is the
    width of the stream.
    """
    # torch's linear layers keep outputs first; GPT-2's Conv1D has the shape (input, output)
    outputs_last = width is not None and shapes[path] == width and width[0] != width[1]
    axis = int(outputs_last)
    total = shapes[path][axis]
    outputs = [
        shapes[other] for other, kind in beside.items() if kind == "output" and len(shapes[other]) == 2
    ]
    if "query" in beside.values():
        queries = 0  # a matrix `kv` beside one of queries, as in many cross-attentions
    elif len(outputs) == 1 and dim:
        # the output projection maps from the width of the queries to that of the stream, whichever is first
        # in its shape: GPT-2's `c_attn`, or Phi-3's `qkv_proj`, whose queries are wider than its keys
        rows, columns = outputs[0]
        queries = rows * columns // dim
    else:
        queries = total // 3  # no output projection tells, as where its name is not known
    keys, odd = divmod(total - queries, 2)
    has_room = not odd and keys > 0
    # several queries may share a key, as in grouped-query attention, but not the other way round: such a
    # matrix holds something else too, as one that also makes the input of a parallel feed-forward does
    if not has_room or 0 < queries < keys:
        return (ParameterPart("other"),)
    parts = (
        ParameterPart("key", axis, queries, queries + keys),
        ParameterPart("value", axis, queries + keys, total),
    )
    return (ParameterPart("query", axis, 0, queries), *parts) if queries else parts


def _ffn(
    shapes: Shapes, path: str, matrices: Sequence[str], widths: Mapping[str, Width], *, dim: int | None
) -> str:
    """Classify a feed-forward matrix by its widths: to the inner width, or back to the stream's, ``dim``; a
    router is neither. ``matrices`` are all of its sublayer.
    """
    holder = _holder(path)
    width = widths.get(holder)
    # experts stacked in one parameter, as in Mixtral, do not have the widths of the module that holds them
    if width is None or dim not in width or set(shapes[path]) != set(width):
        return _ffn_by_name(path)
    given, output = width
    holders = {_holder(other) for other in matrices}
    in_order = [called for called in widths if called in holders]  # widths are in the order of calls
    if output == dim:
        # if the inner width is the stream's, all matrices look alike, and the last one called leads back
        is_square = given == dim
        return "ffn_in" if is_square and holder != in_order[-1] else "ffn_out"
    inner_widths = {widths[called][0] for called in in_order if widths[called][1] == dim}
    # T5's gate `wi_0` is as wide as its `wi_1`; Phi-3's `gate_up_proj` makes both in one matrix
    is_inner = output in inner_widths or output // 2 in inner_widths
    return "ffn_in" if is_inner else "other"  # a router puts out a number for each expert


def _ffn_by_name(path: str) -> str:
    words = {word for name in _names(path) for word in name.split("_")}
    if words & FFN_OUT:
        return "ffn_out"
    return "ffn_in" if words & FFN_IN else "other"


def _like_matrix(shapes: Shapes, known: Mapping[str, Parts], path: str) -> Parts:
    """Return the parts of a bias: those of the matrix beside it, if it has one."""
    matrix = f"{path.removesuffix('bias')}weight"
    parts = known.get(matrix, known[path])
    if len(parts) > 1 and shapes[path][0] != shapes[matrix][parts[0].axis]:
        return (ParameterPart("other"),)
    return tuple(part._replace(axis=0) for part in parts)
