"""Run the studies of a preset on a model and collect their tables and findings."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from normlab.config.fields import Positive
from normlab.config.io import validated
from normlab.diagnosis.reading.structure import Structure, pointed_out, read_structure, unregistered
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.result import Diagnosis
from normlab.diagnosis.rules.finding import SEVERITIES, Finding
from normlab.diagnosis.study import Plan, Study, StudyContext, find, named, registered
from normlab.diagnosis.table import Table
from normlab.errors import UserError
from normlab.trace.setup import Loss, Setup
from normlab.trace.step import OptimizerFactory, made
from normlab.trace.tensors import Call, calling, tensors_in, unwrap
from normlab.trace.trace import output_loss
from normlab.trace.untouched import refuse_hollow, untouched

STEP_LR: Final = 1e-3
"""Learning rate of the step that studies try if none was given; no finding then judges the rate."""


class Options(Plan, total=False):
    """How a model is read, what it is measured on, and the training to come."""

    batches: Sequence[Any]
    """Mini-batches for studies that need several small ones; without them the batch is split."""
    structure: Structure
    """A result of ``read_structure``, where the model was read before."""
    blocks: str | Sequence[str]
    """The container of the repeated blocks, or globs for them, where they are not found."""
    branches: Sequence[str]
    """Modules in a block whose outputs are added to the stream, where the sums are not seen."""
    call: Call
    """``call(model, batch)``, where the batch is not the arguments of the model's forward."""
    studies: Sequence[str]
    """Names of the studies to make, in place of those of the preset."""


@validated
def diagnose(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    lr: Positive | None = None,
    optimiser: torch.optim.Optimizer | OptimizerFactory | None = None,
    preset: str = "standard",
    **options: Unpack[Options],
) -> Diagnosis:
    """Measure a model on a batch, compare it with theory and report findings; the model does not change.

    ``batch`` is a tensor, or a tuple or dict of arguments. ``loss(model, batch)`` returns a scalar; without
    it the model's output must hold one, as Hugging Face's does when the batch holds labels. ``lr`` is the
    learning rate of an Adam; ``optimiser``, either a function that makes one from parameters or one in the
    middle of its training, brings its own. ``preset`` is cheap, standard or full; ``options`` are those of
    ``Options`` and of ``Plan``.

    A study that does not apply to the model becomes a note, one that fails a warning. Raises UserError for a
    model without a residual stream that can be read, one that raises, has no trainable parameter or a loss
    that is not finite, a batch on another device, and a learning rate that is not above 0.

    >>> normlab.diagnose(model, batch, loss=loss, lr=1e-3, preset="cheap").page("diagnosis.html").name
    'diagnosis.html'
    """
    studies = named(options["studies"]) if "studies" in options else registered(preset)
    model, make = _checked(model, batch), optimiser or partial(torch.optim.Adam, lr=lr or STEP_LR)
    batches = batch, options.get("batches")
    setup = Setup(model, batches, loss, make)
    with untouched(setup), calling(model, options.get("call")):
        structure = options.get("structure") or read_structure(
            model, batch, blocks=options.get("blocks", ()), branches=options.get("branches", ())
        )
        unread = [Finding("unread", "note", why, "structure", {}) for why in structure.unread]
        subject = Subject(model, batch, loss or output_loss, structure)
        begun = _loss(subject)
        if not math.isfinite(begun):
            raise UserError(
                f"the loss is {begun} before any step, so that nothing can be measured; normlab.check says "
                "where that begins"
            )
        used, rate = made(make, model)
        amid = " during its training" if used.state else ""
        stepped = f"{type(used).__name__}{amid}, lr {rate:g}"
        context = StudyContext(subject, make, tuple(options.get("batches", ())), cast("Plan", options))
        with _peak(_device(model)) as peak:
            measured = _measure(studies, context)
        judged = (*find(measured.tables, rate if lr or optimiser else None), *unread, *measured.failed)
    return Diagnosis(
        model=type(model).__name__,
        preset=preset,
        structure=subject.structure,
        tables=measured.tables,
        findings=tuple(sorted(judged, key=lambda f: -SEVERITIES.index(f.severity))),
        studies=tuple(studies),
        seconds=measured.seconds,
        applied=measured.applied,
        peak_memory_bytes=peak(),
        facts=_facts(subject) | {"loss": f"{begun:.4g}", "optimiser": stepped},
    )


class _Measured(NamedTuple):
    tables: dict[str, Table]
    failed: list[Finding]
    seconds: dict[str, float]
    applied: tuple[str, ...]


def _measure(studies: Sequence[Study], context: StudyContext) -> _Measured:
    """Make the studies one after the other; one that fails leaves a finding."""
    device = _device(context.subject.model)
    steps = context.warmup_steps
    tables = {"plan": Table("plan", ({"warmup_steps": steps},) if steps else ())}
    seconds, failed, applied = dict[str, float](), list[Finding](), list[str]()
    for study in studies:
        start = time.perf_counter()
        try:
            rows = 0
            for table in study.measure(context):
                known = tables[table.name].rows if table.name in tables else ()
                tables[table.name] = Table(table.name, (*known, *table))
                rows += len(table)
            if rows or study.clean_if_empty:
                applied.append(study.name)
        except Exception as error:  # of any kind: the model is anybody's
            failed.append(_failure(study.name, error))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[study.name] = time.perf_counter() - start
    filled = {name: table for name, table in tables.items() if len(table)}
    return _Measured(filled, failed, seconds, tuple(applied))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _checked(model: nn.Module, batch: Any) -> nn.Module:
    """Return the bare model. Raises UserError if it cannot be examined on this batch."""
    model = unwrap(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__} is compiled by TorchScript, in which no module can be watched; pass the "
            "model as it was before torch.jit.trace or torch.jit.script"
        )
    hidden = unregistered(model)
    if hidden and not any(True for _ in model.parameters()):
        raise UserError("; ".join(pointed_out(path, modules) for path, modules in hidden.items()))
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"no parameter of {type(model).__name__} is trained, so it has no gradients to look at; unfreeze "
            "the ones to examine, as in model.requires_grad_()"
        )
    _somewhere(model, batch)
    return model


def _somewhere(model: nn.Module, batch: Any) -> None:
    """Raise UserError if weights or batch hold no numbers, or are on different devices."""
    refuse_hollow(model)
    homes = sorted({str(p.device) for p in model.parameters()})
    given = [x for _, x in tensors_in(batch)]
    strangers = sorted({str(x.device) for x in given} - set(homes))
    if strangers:
        how = f'as in model.to("{strangers[0]}")'
        if "meta" in strangers:
            how = f"or rather make the batch on {homes[0]}: on meta it holds no numbers"
        raise UserError(
            f"the model is on {', '.join(homes)} and the batch on {', '.join(strangers)}; move one of them, "
            f"{how}"
        )
    if hollow := [list(x.shape) for x in given if not x.numel()]:
        raise UserError(
            f"the batch has a tensor of shape {hollow[0]}, with nothing in it; give one of some sequences"
        )


def _loss(subject: Subject) -> float:
    """Return the loss before any change. Raises UserError if it is not a differentiable scalar."""
    try:
        loss = subject.loss()
    except (RuntimeError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UserError(
            f"the loss raised {type(error).__name__}: {error}; give loss=lambda model, batch: … that calls "
            "the model on the batch and returns a scalar"
        ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"the loss is {given}, and must be one number; return its mean, as in loss.mean()")
    if not loss.requires_grad:
        raise UserError(
            "the loss has no gradient: it is detached or made under torch.no_grad(); return it with its graph"
        )
    return float(loss.detach())


def _failure(study: str, error: Exception) -> Finding:
    said = " ".join(str(error).split())[:300]
    refused = isinstance(error, UserError)
    kind, severity = ("", "note") if refused else (f"{type(error).__name__}: ", "warning")
    return Finding("not_done", severity, f"the study {study} was not done: {kind}{said}", "", {})


@contextmanager
def _peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak memory in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        yield lambda: unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _facts(subject: Subject) -> dict[str, str]:
    model, given = subject.model, [x for _, x in tensors_in(subject.batch)]
    parameters = list(model.parameters())
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    count = f"{sum(p.numel() for p in parameters):,}" + (f", {frozen:,} of them frozen" if frozen else "")
    batch = ", ".join("×".join(map(str, x.shape)) for x in given)
    return {"parameters": count, "batch": batch, "device": str(_device(model))}
