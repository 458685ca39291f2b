"""``diagnose``: check what is given, read the model, run the studies of a preset, and judge their tables."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypedDict, Unpack

import torch
from torch import Tensor, nn

from normlab.base.io import Count, Positive, validated
from normlab.base.units import short_rate
from normlab.diagnosis.reading import pointed_out, read_structure
from normlab.diagnosis.recording import refuse_elsewhere
from normlab.diagnosis.result import Diagnosis
from normlab.diagnosis.structure import Structure
from normlab.diagnosis.study import Finding, Study, by_severity, find, registered, studies_named
from normlab.diagnosis.subject import STEP_LR, AnyOptimizer, Subject
from normlab.diagnosis.tables import Table
from normlab.errors import UserError
from normlab.setups.given import setup_of
from normlab.setups.named import NamedSetup
from normlab.setups.setup import Loss, Setup, output_loss, shown
from normlab.setups.trainers import is_trainer
from normlab.trace.autograd import made
from normlab.trace.facts import Unknown
from normlab.trace.optimizers import made_by
from normlab.trace.rates import rates_of
from normlab.trace.restore import refuse_hollow, restored, same_globals, same_random_state, undisturbed
from normlab.trace.tensors import Call, call_model, tensors_in, unregistered, unwrap

BRANCH: Final = "f"
"""The attribute under which a sublayer of normlab's has its branch."""


class Options(TypedDict, total=False):
    """How a model is read, what it is measured on, and the training ahead."""

    batches: Sequence[Any]
    """Mini-batches for studies that need several small ones; without any, the batch is split."""
    structure: Structure
    """A result of ``read_structure``, if the model was read before."""
    blocks: str | Sequence[str]
    """The container of the repeated blocks, or globs for them, if they are not found."""
    branches: Sequence[str]
    """Modules in a block whose outputs are added to the stream, if the sums are not seen."""
    call: Call
    """``call(model, batch)``, if the batch is not what the model takes and no loss calls it."""
    studies: Sequence[str]
    """Names of the studies to run, instead of those of the preset."""
    warmup_steps: Count
    """Steps over which the learning rate rises to its peak, in the training ahead; without any, those of the
    setup's scheduler.
    """
    begins_at: Positive
    """The share of the peak at the first of these steps; without it, one over their number."""


@validated
def diagnose(
    model: Any,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    lr: Positive | None = None,
    optimizer: AnyOptimizer | None = None,
    preset: str = "standard",
    **options: Unpack[Options],
) -> Diagnosis:
    """Measure a model on a batch, compare it with theory and report findings; the model does not change.

    A ``Setup``, or a trainer as for ``check``, replaces ``model``, ``batch``, ``loss`` and ``optimizer``, or
    ``lr``. ``batch`` is a tensor, or a tuple or dict of arguments. ``loss(model, batch)`` returns a scalar,
    and the model is called as the loss calls it; without one, the model's output must hold a loss. ``lr`` is
    the learning rate of an Adam; ``optimizer``, a function that makes one from parameters or one in the
    middle of its training, brings its own. ``preset`` is cheap, standard or full.

    A study that does not apply to the model becomes a note; one that fails, a warning. Raises UserError for a
    model that raises, has no readable residual stream, no trainable parameter or a loss that is not finite,
    for a batch on another device, a rate that is not above 0, and several optimizers.

    >>> normlab.diagnose(model, batch, loss=loss, lr=1e-3, preset="cheap").page("diagnosis.html").name
    'diagnosis.html'
    """
    if isinstance(model, Setup) or is_trainer(model):
        beside = {} if optimizer is None else {"optimizer": optimizer}
        setup = setup_of("diagnose", model, batch, loss, beside)
        setup.require("loss", "gradient")
        return _of_setup(setup, lr, preset, options)
    return _of_model(model, batch, loss, lr, optimizer, preset, options)


def diagnose_named(
    source: NamedSetup, preset: str, lr: float | None = None, **options: Unpack[Options]
) -> Diagnosis:
    """Run the studies of a preset on a setup with what is known of its training; see ``diagnose``.

    Raises UserError if that is impossible.
    """
    known: Options = {"batches": source.mini_batches(), "warmup_steps": source.warmup_steps}
    return diagnose(source.setup, loss=None, lr=lr, optimizer=None, preset=preset, **(known | options))


def _of_model(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    lr: float | None,
    optimizer: AnyOptimizer | None,
    preset: str,
    options: Options,
) -> Diagnosis:
    """Diagnose a model on a batch; see ``diagnose``."""
    studies = studies_named(options["studies"]) if "studies" in options else registered(preset)
    model = _checked(model, batch)
    optimizer_or_adam = optimizer or partial(torch.optim.Adam, lr=lr or STEP_LR)
    batches = tuple(options.get("batches", ()))
    call = options.get("call") or loss or call_model
    with restored(Setup(model, (batch, batches), loss, optimizer_or_adam)) as not_copied:
        # a loss that is given is tried before the model is read: its errors are not the reader's
        loss_before = _loss(model, batch, loss) if loss else None
        structure = options.get("structure") or _read(model, batch, call, options)
        stepping, rate = made(optimizer_or_adam, model)
        subject = Subject(
            model,
            batch,
            loss or partial(output_loss, call=call),
            structure,
            optimizer=optimizer_or_adam,
            batches=batches,
            warmup_steps=0 if stepping.state else options.get("warmup_steps", 0),
            begins_at=options.get("begins_at"),
            call=call,
        )
        if loss_before is None:
            loss_before = _loss(model, batch, subject.loss_of)
        measured = _measure(studies, subject)
        findings = find(measured.tables, rate if lr or optimizer else None)
    unread = [Finding("unread", "note", why, "structure", {}) for why in structure.unread]
    return Diagnosis(
        model=type(model).__name__,
        preset=preset,
        structure=structure,
        tables=measured.tables,
        findings=by_severity((*findings, *unread, *measured.failed)),
        studies=tuple(studies),
        seconds=measured.seconds,
        applied=tuple(measured.applied),
        peak_memory_bytes=_peak_memory(_device(model)),
        facts={**_facts(subject, loss_before, stepping, rate), **not_copied},
    )


def _read(model: nn.Module, batch: Any, call: Call, options: Options) -> Structure:
    """Read the residual stream: by its sums or, where a stack shows none, by the branches of its sublayers.

    nGPT's stream is no sum: each sublayer moves it along a sphere, from x towards what its branch puts out.
    So a sublayer in the form of normlab's own, which names its branch ``f``, is read by that branch. Stacks
    that show sums are read by them all the same, since sums tell more.
    """
    blocks, branches = options.get("blocks", ()), options.get("branches", ())
    naming_branches = {path.rpartition(".")[0] for path, m in model.named_modules() if _names_its_branch(m)}
    if not naming_branches or blocks or branches:
        return read_structure(model, batch, call=call, blocks=blocks, branches=branches)
    try:
        by_sums = read_structure(model, batch, call=call)
    except UserError as no_sums:
        with suppress(UserError):
            return read_structure(model, batch, call=call, branches=(BRANCH,))
        raise no_sums from None
    read = {stack.name: stack for stack in by_sums.stacks}
    if read.keys() >= naming_branches:
        return by_sums
    with suppress(UserError):
        by_branches = read_structure(model, batch, call=call, branches=(BRANCH,))
        return replace(by_branches, stacks=tuple(read.get(s.name, s) for s in by_branches.stacks))
    return by_sums


def _names_its_branch(module: nn.Module) -> bool:
    """Return whether a module has the form of a sublayer of normlab's: a branch under a placement ``place``
    at a ``site``. The form is enough, so a diagnosis need not import the models that normlab builds.
    """
    has_branch = isinstance(getattr(module, BRANCH, None), nn.Module)
    return has_branch and hasattr(module, "place") and hasattr(module, "site")


def _of_setup(setup: Setup, lr: float | None, preset: str, options: Options) -> Diagnosis:
    """Diagnose what a setup holds, at the rate that its schedule reaches first."""
    with restored(setup) as not_copied:  # drawing a batch changes what it is drawn from, and random states
        optimizer, rate = _one_optimizer(setup, lr)
        model, batch, loss = setup.model, setup.batch, setup.loss
        with _at_the_peak(setup, optimizer, options) as known:
            result = diagnose(model, batch, loss=loss, lr=rate, optimizer=optimizer, preset=preset, **known)
    return replace(result, facts={**result.facts, **not_copied})


def _one_optimizer(setup: Setup, lr: float | None) -> tuple[torch.optim.Optimizer | None, float | None]:
    """Return the one optimizer of a setup or, if it has none, the rate of an Adam.

    Raises UserError for several optimizers, and for a rate if the optimizer brings its own.
    """
    optimizer = setup.optimizer
    if optimizer is not None and lr is not None:
        raise UserError("the setup's optimizer brings its own learning rate; leave lr (--lr) out")
    if callable(optimizer):
        optimizer = made_by("optimizer", optimizer, setup.model, "param_groups")
    if isinstance(optimizer, (list, tuple)):
        if len(optimizer) > 1:
            raise UserError(f"the setup has {len(optimizer)} optimizers, and a diagnosis steps with one")
        optimizer = optimizer[0] if optimizer else None
    if optimizer is not None:
        return optimizer, None
    return None, setup.lr if lr is None else lr


@contextmanager
def _at_the_peak(
    setup: Setup, optimizer: torch.optim.Optimizer | None, options: Options
) -> Iterator[Options]:
    """Inside this block, an optimizer that has not stepped has the rates that the setup's schedule will reach
    first; yields the options with the warm-up to them. An optimizer in its training is beyond that.
    """
    if setup.scheduler is None or optimizer is None or optimizer.state or options.get("warmup_steps"):
        yield options
        return
    try:
        with same_globals(), same_random_state():
            rise = rates_of(setup).first_rise
    except Unknown:  # a copy of the scheduler is followed, and something cannot be copied
        yield options
        return
    before = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rise.peaks, strict=True):
            group["lr"] = rate
        yield {**options, "warmup_steps": rise.steps, "begins_at": rise.first_share}
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate


@dataclass
class _Measured:
    """What studies gave."""

    tables: dict[str, Table] = field(default_factory=dict)
    failed: list[Finding] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    applied: list[str] = field(default_factory=list)
    """Names of the studies whose tables have rows."""

    def add(self, tables: Table | Iterable[Table]) -> int:
        """Add tables, each to one of the same name if there is one; return the number of their rows."""
        added = 0
        for table in [tables] if isinstance(tables, Table) else tables:
            rows = self.tables[table.name].rows if table.name in self.tables else ()
            if len(table):
                self.tables[table.name] = Table(table.name, (*rows, *table))
            added += len(table)
        return added


def _measure(studies: Sequence[Study], subject: Subject) -> _Measured:
    """Run the studies one by one; one that fails becomes a finding."""
    device, measured = _device(subject.model), _Measured()
    if subject.warmup_steps:
        share = {} if subject.begins_at is None else {"first_share": subject.begins_at}
        measured.add(Table("plan", ({"warmup_steps": subject.warmup_steps, **share},)))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for study in studies:
        start = time.perf_counter()
        try:
            if measured.add(study.measure(subject)):
                measured.applied.append(study.name)
        except Exception as error:  # of any kind: the model may be anybody's
            measured.failed.append(_failure(study.name, error))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        measured.seconds[study.name] = time.perf_counter() - start
    return measured


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _checked(model: nn.Module, batch: Any) -> nn.Module:
    """Return the bare model. Raises UserError if it cannot be examined on this batch."""
    if batch is None:
        raise UserError("give a batch too, as in normlab.diagnose(model, batch, loss=loss), or one Setup")
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {shown(model)}, and must be a torch.nn.Module, a Setup or a trainer")
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
    refuse_hollow(model)
    refuse_elsewhere(model, batch)
    for _, x in tensors_in(batch):
        if not x.numel():
            shape = list(x.shape)
            raise UserError(
                f"the batch has a tensor of shape {shape}, with nothing in it; give one of some sequences"
            )
    return model


def _loss(model: nn.Module, batch: Any, loss_of: Loss) -> float:
    """Return the loss before any change. Raises UserError if it is not a finite, differentiable scalar."""
    try:
        with undisturbed(model, batch):
            loss = loss_of(model, batch)
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
    value = float(loss.detach())
    if not math.isfinite(value):
        raise UserError(
            f"the loss is {value} before any step, so nothing can be measured; normlab.check says "
            "where that begins"
        )
    return value


def _failure(study: str, error: Exception) -> Finding:
    why = " ".join(str(error).split())[:300]
    severity = "note"  # the study does not apply, or says what it needs
    if not isinstance(error, UserError):
        severity, why = "warning", f"{type(error).__name__}: {why}"
    return Finding("not_done", severity, f"the study {study} was not done: {why}", "", {})


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _facts(subject: Subject, loss: float, optimizer: torch.optim.Optimizer, rate: float) -> dict[str, str]:
    parameters = list(subject.model.parameters())
    numbers = f"{sum(p.numel() for p in parameters):,}"
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    if frozen:
        numbers += f", {frozen:,} of them frozen"
    shapes = ["×".join(map(str, x.shape)) for _, x in tensors_in(subject.batch)]
    in_training = " during its training" if optimizer.state else ""
    return {
        "parameters": numbers,
        "batch": ", ".join(shapes),
        "device": str(_device(subject.model)),
        "loss": f"{loss:.4g}",
        # three digits, so that a schedule that begins next to its peak shows the rate that was typed
        "optimizer": f"{type(optimizer).__name__}{in_training}, lr {short_rate(rate, 3)}",
    }
