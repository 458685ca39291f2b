"""The authors' numbers in ``data``, and where each of their arrays lies in a model of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oracles.comparing import TOLERANCE

DATA = Path(__file__).parent / "data"
Case = Mapping[str, Tensor]
ROLES = {"self_attention": "self", "causal_attention": "self", "cross_attention": "cross", "ffn": "ffn"}
"""By our role of a sublayer, the word for it in the authors' arrays."""
PACKED: dict[str, dict[str, tuple[str, int, int]]] = {
    "self": {"q": ("qkv", 0, 3), "k": ("qkv", 1, 3), "v": ("qkv", 2, 3), "out": ("out", 0, 1)},
    "cross": {"q": ("q", 0, 1), "k": ("kv", 0, 2), "v": ("kv", 1, 2), "out": ("out", 0, 1)},
    "ffn": {"in": ("inner", 0, 1), "out": ("outer", 0, 1)},
}
"""A matrix of a branch: our projection, and which of how many equal parts of its rows it is."""
NO_WEIGHTS = ("in", "pad", "hyper", "out", "grad", "start")


def case(name: str) -> Case:
    """Return all arrays of a file by their names."""
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(array) for key, array in arrays.items()}


def below(arrays: Case, prefix: str) -> dict[str, Tensor]:
    """Return the arrays whose names begin with a word, by the rest of their names."""
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}


def only(module: nn.Module, ending: str) -> nn.Parameter:
    """Return the one parameter of a module whose path ends with these words."""
    [found] = [p for name, p in module.named_parameters() if f".{name}".endswith(f".{ending}")]
    return found


def located(model: Any, name: str) -> tuple[nn.Parameter, slice]:
    """Return the parameter of ours, and its rows, that hold a named array of the authors.

    ``model`` has the stacks ``encoder`` and ``decoder``, or is a single stack.
    """
    stack_name, *path = name.split(".")
    whole = slice(None)
    if stack_name == "embed":
        return model.embedding.weight, whole
    stack = {"enc": "encoder", "dec": "decoder"}.get(stack_name)
    stack = getattr(model, stack) if stack else model
    if stack_name in ("begin", "end") or path[0] == "end":
        return only(stack.begin if stack_name == "begin" else stack.end, path[-1]), whole
    layer, (role, *rest) = int(path[0]), path[1:]
    sublayers = {ROLES[s.site.role]: s for s in stack if s.site.layer == layer}
    if role not in sublayers:  # a parameter that the sublayers of a layer share
        return only(sublayers["self"].place, role), whole
    sublayer = sublayers[role]
    if rest[0] in PACKED[role] and stack_name != "layer":
        projection, part, parts = PACKED[role][rest[0]]
        parameter = getattr(getattr(sublayer.f, projection), rest[1])
        rows = len(parameter) // parts
        return parameter, slice(part * rows, (part + 1) * rows)
    in_branch = rest[0] in ("inner_norm", "a", "b", "m")
    return only(sublayer.f if in_branch else sublayer.place, ".".join(rest)), whole


@torch.no_grad()
def load_(model: nn.Module, arrays: Case) -> None:
    """Copy every weight of the file into the model, and see that no weight of its stacks is left out."""
    stacks = [model.encoder, model.decoder] if hasattr(model, "encoder") else [model]
    for stack in stacks:
        for parameter in stack.parameters():
            parameter.fill_(torch.nan)
    for name, array in arrays.items():
        if name.split(".")[0] not in NO_WEIGHTS:
            parameter, rows = located(model, name)
            assert parameter[rows].shape == array.shape, name
            parameter[rows] = array
    left_out = [n for stack in stacks for n, p in stack.named_parameters() if p.isnan().any()]
    assert not left_out, f"no array of the file is for {left_out}"


def equal(found: Any, expected: Any, *, tolerance: float = TOLERANCE, what: str = "") -> None:
    """Assert that arrays are equal, relative to the largest number expected."""
    found, expected = (torch.as_tensor(x, dtype=torch.float64).detach().numpy() for x in (found, expected))
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=tolerance * np.abs(expected).max(), err_msg=what, strict=True
    )


def same_gradients(model: nn.Module, loss: Tensor, arrays: Case) -> None:
    """Compare every gradient in the file with that of the loss."""
    model.zero_grad()
    loss.backward()
    expected = below(arrays, "grad.")
    assert expected
    for name, gradient in expected.items():
        parameter, rows = located(model, name)
        assert parameter.grad is not None, name
        equal(parameter.grad[rows], gradient, what=name)
