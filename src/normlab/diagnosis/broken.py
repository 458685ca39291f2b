"""What is wrong with a model whose numbers are not finite, so that nothing else can be measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.reading.batches import tokens
from normlab.diagnosis.reading.naming import layer_of
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.rules.finding import Finding
from normlab.trace.tensors import forward_hooks, tensors_in, wide

INITIALISE: Final = "initialise it: it may still hold memory from torch.empty or to_empty"
EARLIER: Final = "go back to earlier weights"


def broken_parameters(model: nn.Module, *, trained: bool) -> list[Finding]:
    """Name the parameters that are infinite or not a number; ``trained`` is whether training has begun."""
    do = EARLIER if trained else INITIALISE
    return [_entries("parameter", path, p, ~wide(p.detach()).isfinite(), do) for path, p in _broken(model)]


def _broken(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((path, p) for path, p in model.named_parameters() if not bool(wide(p.detach()).isfinite().all()))


def broken_loss(subject: Subject) -> list[Finding]:
    """Name what makes a loss infinite or not a number although all parameters are finite: buffers that are
    not a number, or else the first module inside the model that makes such an output of finite inputs, labels
    that are all ignored, or the model as a whole; nothing where there is none of these.
    """
    buffers = [(path, b) for path, b in subject.model.named_buffers() if b.is_floating_point()]
    found = [_entries("buffer", path, b, b.isnan(), INITIALISE) for path, b in buffers if b.isnan().any()]
    if found:
        return found
    path = _first_module(subject)
    if not path and (ignored := _ignored(subject)):
        return [ignored]
    if path is None:
        return []
    name = path or "the model"
    return [
        Finding(
            "not_finite",
            "problem",
            f"{name} puts out what is infinite or not a number, and what goes into it is finite",
            "",
            {},
            module=path,
            layer=layer_of(path),
            do="look for a division by zero, a logarithm of zero, and a row of attention without any key",
        )
    ]


def _ignored(subject: Subject) -> Finding | None:
    """A mean over no label at all is not a number."""
    for x in tokens(subject.batch).values():
        if bool((x < 0).all()):
            return Finding(
                "no_labels",
                "problem",
                f"the loss is the mean over no position: all {x.numel():,} labels are {int(x.max())}, which "
                "is ignored",
                "targets",
                {"labels": x.numel(), "counted": 0},
                do="look at how labels are made: what marks the words to be predicted may not be in the text",
            )
    return None


def _entries(kind: str, path: str, x: Tensor, bad: Tensor, do: str) -> Finding:
    count, module = int(bad.sum()), path.rpartition(".")[0]
    verb = "is" if count == 1 else "are"
    return Finding(
        "not_finite",
        "problem",
        f"{count:,} of the {x.numel():,} entries of the {kind} {path} {verb} infinite or not a number",
        "",
        {"entries": count},
        module=module,
        layer=layer_of(path),
        do=do,
    )


def _first_module(subject: Subject) -> str | None:
    """The path of the first module, in the order in which they end, that makes numbers that are not finite of
    finite ones while the loss is computed. A mask of minus infinity is no such input or output.
    """
    finite: dict[str, bool] = {}
    found: list[str] = []

    def see(path: str, side: str, values: Any) -> None:
        numbers = [x for _, x in tensors_in(values) if x.is_floating_point() and not _mask(x)]
        whole = all(bool(x.isfinite().all()) for x in numbers)
        if side == "input":
            finite[path] = whole
        elif not whole and finite.get(path, True):
            found.append(path)

    modules = dict(subject.model.named_modules())
    with forward_hooks(modules, see):
        subject.loss()
    return next(iter(found), None)


def _mask(x: Tensor) -> bool:
    """Whether a tensor holds 0 and minus infinity alone."""
    return bool(((x == 0) | (x == -torch.inf)).all())
