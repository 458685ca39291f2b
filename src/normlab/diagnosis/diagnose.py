"""Run the studies of a preset on a model: their tables, their findings and the verdict in one line."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from normlab.base.extras import what_to_install
from normlab.base.io import Count, Positive, to_plain, validated
from normlab.base.units import count
from normlab.diagnosis.reading import pointed_out, read_structure
from normlab.diagnosis.recording import refuse_elsewhere
from normlab.diagnosis.structure import StackView, Structure
from normlab.diagnosis.study import SEVERITIES, Finding, Study, by_severity, find, registered, studies_named
from normlab.diagnosis.subject import STEP_LR, AnyOptimizer, Subject
from normlab.diagnosis.tables import Row, Table, Tables
from normlab.errors import UserError
from normlab.setups.given import setup_of
from normlab.setups.named import NamedSetup
from normlab.setups.setup import Loss, Setup, output_loss, shown
from normlab.setups.trainers import is_trainer
from normlab.trace.autograd import made
from normlab.trace.facts import Unknown
from normlab.trace.optimizers import made_by, rates_of
from normlab.trace.restore import refuse_hollow, restored, same_globals, same_random_state, undisturbed
from normlab.trace.tensors import Call, call_model, tensors_in, unregistered, unwrap

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The tables that were measured, and the findings that follow from them."""

    model: str
    """Name of the model's class."""
    preset: str
    structure: Structure
    tables: Mapping[str, Table]
    findings: tuple[Finding, ...]
    """The most severe ones first."""
    studies: tuple[Study, ...]
    """The studies that ran, in their order."""
    seconds: Mapping[str, float]
    """Seconds of each study by its name."""
    applied: tuple[str, ...]
    """Names of the studies that had something to measure and did not fail."""
    peak_memory_bytes: int
    """Peak memory: the process's so far on a CPU, torch's tensors' during the diagnosis on a GPU."""
    facts: Mapping[str, str]
    """Parameters, batch, loss, learning rate, optimizer and device, in words."""

    @property
    def cause(self) -> Finding | None:
        grave = self.at_least("warning")
        return max(grave, key=lambda f: SEVERITIES.index(f.severity), default=None)

    @property
    def verdict(self) -> str:
        """One line: the cause, or that nothing was found."""
        if self.cause is None:
            unused = [study.name for study in self.studies if study.name not in self.applied]
            idle = f" (not applicable: {', '.join(unused).replace('_', ' ')})" if unused else ""
            return f"nothing found in {len(self.applied)} studies{idle}"
        return f"{self.cause.severity}: {self.cause.sentence}"

    def at_least(self, severity: str) -> list[Finding]:
        """Return the findings of this severity (``warning``, say) or above."""
        return [f for f in self.findings if SEVERITIES.index(f.severity) >= SEVERITIES.index(severity)]

    def to_plain(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "cause": None if self.cause is None else self.cause.to_plain(),
            "model": self.model,
            "preset": self.preset,
            "facts": dict(self.facts),
            "structure": str(self.structure),
            "stacks": {stack.name: Tables(self.tables).label(stack.name) for stack in self.structure.stacks},
            "findings": [finding.to_plain() for finding in self.findings],
            "studies": [study.to_plain() for study in self.studies],
            "seconds": dict(self.seconds),
            "applied": list(self.applied),
            "peak_memory_bytes": self.peak_memory_bytes,
            "tables": {name: [dict(row) for row in table] for name, table in self.tables.items()},
        }

    def to_polars(self) -> dict[str, pl.DataFrame]:
        """Return the tables by name, and the findings as one more, as polars data frames.

        Raises UserError if polars is not installed.
        """
        try:
            import polars as pl
        except ModuleNotFoundError as error:
            raise UserError(what_to_install("Diagnosis.to_polars()", "charts")) from error

        tables = {name: [dict(row) for row in table] for name, table in self.tables.items()}
        tables["findings"] = [{**vars(f), "numbers": f.evidence} for f in self.findings]
        return {name: pl.DataFrame(rows, infer_schema_length=None) for name, rows in tables.items()}

    def page(self, path: str | Path) -> Path:
        """Draw the diagnosis as a page at this path, with its numbers as JSON beside it; return the path."""
        from normlab.report.diagnosis import write_diagnosis

        where = Path(path)
        name = where.name.removesuffix(".html")  # not its stem: v1.2 is a name
        return write_diagnosis(to_plain(self.to_plain()), where.parent, name)

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(str(finding) for finding in self.findings)])

    def __repr__(self) -> str:
        counted = Counter(finding.severity for finding in self.findings)
        counts = ", ".join(count(counted[kind], kind) for kind in reversed(SEVERITIES) if counted[kind])
        return f"<Diagnosis of {self.model}: {self.verdict} ({counts or 'no finding'})>"

    def _repr_html_(self) -> str:
        """The verdict and the findings, for a notebook; notes fold away."""
        item = "<li><b>{}</b>: {}<br><small>{}</small></li>"
        grave, notes = list[str](), list[str]()
        for f in self.findings:
            line = item.format(f.severity, escape(f.sentence), escape(f.evidence))
            (notes if f.severity == "note" else grave).append(line)
        head = f"<p><b>{escape(self.model)}</b>: {escape(self.verdict)}</p><ul>{''.join(grave)}</ul>"
        folded = f"<details><summary>{count(len(notes), 'note')}</summary><ul>{''.join(notes)}</ul></details>"
        return head + folded * bool(notes)


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
        own = setup_of("diagnose", model, batch, loss, {} if optimizer is None else {"optimizer": optimizer})
        own.require("loss", "gradient")
        return _of_setup(own, lr, preset, options)
    studies = studies_named(options["studies"]) if "studies" in options else registered(preset)
    model, make = _checked(model, batch), optimizer or partial(torch.optim.Adam, lr=lr or STEP_LR)
    batches = tuple(options.get("batches", ()))
    setup = Setup(model, (batch, batches), loss, make)
    call = options.get("call") or loss or call_model
    with restored(setup) as not_copied:
        begun = _loss(model, batch, loss) if loss else None  # its errors are its own, not the reader's
        structure = options.get("structure") or _read(model, batch, call, options)
        used, rate = made(make, model)
        warmup = 0 if used.state else options.get("warmup_steps", 0)
        loss = loss or partial(output_loss, call=call)
        begins_at = options.get("begins_at")
        subject = Subject(model, batch, loss, structure, None, make, batches, warmup, begins_at, call)
        begun = _loss(model, batch, loss) if begun is None else begun
        tables, failed, seconds, applied = _measure(studies, subject)
        findings = find(tables, rate if lr or optimizer else None)
    unread = [Finding("unread", "note", why, "structure", {}) for why in structure.unread]
    return Diagnosis(
        model=type(model).__name__,
        preset=preset,
        structure=structure,
        tables=tables,
        findings=by_severity((*findings, *unread, *failed)),
        studies=tuple(studies),
        seconds=seconds,
        applied=applied,
        peak_memory_bytes=_peak_memory(_device(model)),
        facts={**_facts(subject, begun, used, rate), **not_copied},
    )


def diagnose_named(
    source: NamedSetup, preset: str, lr: float | None = None, **options: Unpack[Options]
) -> Diagnosis:
    """Run the studies of a preset on a setup with what is known of its training; see ``diagnose``.

    Raises UserError if that is impossible.
    """
    known: Options = {"batches": source.mini_batches(), "warmup_steps": source.warmup_steps}
    return diagnose(source.setup, loss=None, lr=lr, optimizer=None, preset=preset, **(known | options))


def _read(model: nn.Module, batch: Any, call: Call, options: Options) -> Structure:
    """Read the residual stream. A sublayer that names its branch and shows no sum, as when its placement
    keeps the stream on a sphere, is read by that branch.
    """
    blocks, branches = options.get("blocks", ()), options.get("branches", ())
    stacks = {path.rpartition(".")[0] for path, m in model.named_modules() if _names_its_branch(m)}
    if stacks and not blocks and not branches:
        seen = dict[str, StackView]()
        with suppress(UserError):
            read = read_structure(model, batch, call=call)
            seen = {stack.name: stack for stack in read.stacks}
            if seen.keys() >= stacks:
                return read
        with suppress(UserError):
            by_branch = read_structure(model, batch, call=call, branches=("f",))
            return replace(by_branch, stacks=tuple(seen.get(stack.name, stack) for stack in by_branch.stacks))
    return read_structure(model, batch, call=call, blocks=blocks, branches=branches)


def _names_its_branch(module: nn.Module) -> bool:
    """Return whether a module has the form of a sublayer of normlab's: a branch ``f`` under a placement
    ``place`` at a ``site``. The form is enough, so a diagnosis need not import the models that normlab
    builds.
    """
    has_branch = isinstance(getattr(module, "f", None), nn.Module)
    return has_branch and hasattr(module, "place") and hasattr(module, "site")


def _of_setup(own: Setup, lr: float | None, preset: str, options: Options) -> Diagnosis:
    """Diagnose what a setup holds, at the rate that its schedule reaches first."""
    with restored(own) as not_copied:  # drawing a batch changes what it is drawn from, and random states
        (step, rate), batch = _one_optimizer(own, lr), own.batch
        with _at_the_peak(own, step, options) as known:
            found = diagnose(own.model, batch, loss=own.loss, lr=rate, optimizer=step, preset=preset, **known)
    return replace(found, facts={**found.facts, **not_copied})


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
    return optimizer, None if optimizer is not None else setup.lr if lr is None else lr


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


def _measure(
    studies: Sequence[Study], subject: Subject
) -> tuple[dict[str, Table], list[Finding], dict[str, float], tuple[str, ...]]:
    """Run the studies one by one; return tables, failures, seconds, and the names of those that apply."""
    device, plan = _device(subject.model), list[Row]()
    if subject.warmup_steps:
        begun = {} if subject.begins_at is None else {"first_share": subject.begins_at}
        plan = [{"warmup_steps": subject.warmup_steps, **begun}]
    tables = {"plan": Table("plan", tuple(plan))}
    seconds, failed, applied = dict[str, float](), list[Finding](), list[str]()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for study in studies:
        start = time.perf_counter()
        try:
            result, rows = study.measure(subject), 0
            for table in [result] if isinstance(result, Table) else result:
                known = tables[table.name].rows if table.name in tables else ()
                tables[table.name] = Table(table.name, (*known, *table))
                rows += len(table)
            if rows:
                applied.append(study.name)
        except Exception as error:  # of any kind: the model may be anybody's
            failed.append(_failure(study.name, error))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[study.name] = time.perf_counter() - start
    return {n: t for n, t in tables.items() if len(t)}, failed, seconds, tuple(applied)


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
    if hollow := [list(x.shape) for _, x in tensors_in(batch) if not x.numel()]:
        raise UserError(
            f"the batch has a tensor of shape {hollow[0]}, with nothing in it; give one of some sequences"
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
    if not math.isfinite(begun := float(loss.detach())):
        raise UserError(
            f"the loss is {begun} before any step, so nothing can be measured; normlab.check says "
            "where that begins"
        )
    return begun


def _failure(study: str, error: Exception) -> Finding:
    why = " ".join(str(error).split())[:300]
    refused = isinstance(error, UserError)
    kind, severity = ("", "note") if refused else (f"{type(error).__name__}: ", "warning")
    return Finding("not_done", severity, f"the study {study} was not done: {kind}{why}", "", {})


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _facts(subject: Subject, loss: float, used: torch.optim.Optimizer, rate: float) -> dict[str, str]:
    model, given = subject.model, [x for _, x in tensors_in(subject.batch)]
    parameters = list(model.parameters())
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    count = f"{sum(p.numel() for p in parameters):,}" + (f", {frozen:,} of them frozen" if frozen else "")
    batch = ", ".join("×".join(map(str, x.shape)) for x in given)
    optimizer = f"{type(used).__name__}{' during its training' * bool(used.state)}, lr {rate:g}"
    facts = {"parameters": count, "batch": batch, "device": str(_device(model))}
    return facts | {"loss": f"{loss:.4g}", "optimizer": optimizer}
