"""A transfer: trials of a model in several sizes at several learning rates, and its coordinate check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from normlab.report.results.plain import fields_of


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval; None where that is not known."""

    value: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, estimate: Mapping[str, Any]) -> Self:
        return cls(**fields_of(cls, estimate))


@dataclass(frozen=True)
class RateResult:
    """The trials of one size at one rate, a trial for each seed."""

    rate: float
    multiple: float
    """The rate as a multiple of the setup's own at that size."""
    loss: float | None
    """The mean over all seeds; None if the trial of one did not reach its end."""
    losses: Mapping[str, float | None]
    """By seed; None if its trial did not reach its end."""
    stopped: str
    """Why one ended early; empty if none did."""

    @property
    def known(self) -> list[float]:
        """The losses of the seeds whose trials reached their end."""
        return [loss for loss in self.losses.values() if loss is not None]


@dataclass(frozen=True)
class FittedPoint:
    """A point of the curve that was fitted to the losses of a size."""

    rate: float
    multiple: float
    loss: float


@dataclass(frozen=True)
class BestRate:
    """A best rate, and the same as a multiple of the setup's own at that size."""

    rate: Estimate
    multiple: Estimate

    @classmethod
    def of(cls, best: Mapping[str, Any]) -> Self:
        return cls(Estimate.of(best), Estimate.of(best["multiple"]))


@dataclass(frozen=True)
class SizeResult:
    """The trials of one size with one weight decay."""

    size: int
    best: BestRate
    why: str
    """Why the best rate is not known; empty if it is."""
    rates: Sequence[RateResult]
    curve: Sequence[FittedPoint]
    reference: float
    """The loss of a model that has learnt nothing."""

    @classmethod
    def of(cls, size: Mapping[str, Any]) -> Self:
        return cls(
            size=size["size"],
            best=BestRate(Estimate.of(size["optimum"]), Estimate.of(size["multiple"])),
            why=size["optimum"]["why"],
            rates=[RateResult(**fields_of(RateResult, trial)) for trial in size["rates"]],
            curve=[FittedPoint(**fields_of(FittedPoint, point)) for point in size["curve"]],
            reference=float(size["reference"]),  # it may be "nan"
        )


@dataclass(frozen=True)
class SweepResult:
    """The trials of all sizes with one weight decay."""

    label: str
    """The weight decay in words."""
    verdict: str
    sizes: Sequence[SizeResult]
    line: Mapping[int, BestRate]
    """The line through the best rates, by size; empty if there is none."""
    slope: Estimate | None
    """The factor of the best rate with each doubling of the size."""
    at_target: BestRate | None
    """The rate on the line at the size for which one is wanted."""

    @classmethod
    def of(cls, sweep: Mapping[str, Any]) -> Self:
        return cls(
            label=sweep["label"],
            verdict=sweep["verdict"],
            sizes=[SizeResult.of(size) for size in sweep["sizes"]],
            line={point["size"]: BestRate.of(point) for point in sweep["line"]},
            slope=Estimate.of(sweep["slope"]) if sweep["slope"] else None,
            at_target=BestRate.of(sweep["at_target"]) if sweep["at_target"] else None,
        )


@dataclass(frozen=True)
class CoordinateRow:
    """How one quantity at one place goes with the size: its exponent, and the intended one."""

    role: str
    module: str
    quantity: str
    step: int
    slope: float | None
    low: float | None
    high: float | None
    expected: float | None
    expected_low: float | None
    """The least exponent that is right; None if any below ``expected`` is."""
    right: bool | None
    """None if it is not judged."""
    parameter: str
    path: str
    """A module of the largest model that has it."""
    is_fault: bool = False
    """Whether it is the first row that is wrong."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        # where the key is missing, one exponent alone is right; where it is null, all below that are
        return cls(**{"expected_low": row["expected"], **fields_of(cls, row)})


@dataclass(frozen=True)
class CoordinateCheck:
    """Whether every part of the model starts and is changed alike at every size."""

    axis: str
    seeds: Sequence[int]
    steps: int
    parametrisation: str
    rows: Sequence[CoordinateRow]
    fault: CoordinateRow | None
    """The first row that is wrong; its module is the row's ``path``."""
    sentence: str
    notes: Sequence[str]

    @classmethod
    def of(cls, check: Mapping[str, Any]) -> Self:
        values = fields_of(cls, check)
        values["seeds"], values["notes"] = tuple(check["seeds"]), tuple(check["notes"])
        fault = CoordinateRow.of(check["fault"]) if check["fault"] else None
        rows = []
        for plain_row in check["rows"]:
            row = CoordinateRow.of(plain_row)
            # a row names modules of every size ("h.*.mlp"), and the fault one of them by its path ("h.3.mlp")
            rows.append(replace(row, is_fault=replace(row, module=row.path) == fault))
        values["fault"], values["rows"] = fault, rows
        return cls(**values)


@dataclass(frozen=True)
class ModelResult:
    """A model of the family."""

    size: int
    rate: float
    """The rate of the setup at this size."""
    parameters: int


@dataclass(frozen=True)
class Cost:
    """What the trials took."""

    trials: int
    seconds: float


@dataclass(frozen=True)
class TransferResult:
    """``Transfer.to_dict()``, with the command that a command line adds."""

    title: str
    axis: str
    """What the sizes are: width or depth."""
    target: int
    """The size for which a rate is wanted."""
    steps: int
    seeds: int
    current_rate: float
    plan: str
    facts: Mapping[str, str]
    sentence: str
    lines: Sequence[str]
    sizes: Sequence[int]
    models: Sequence[ModelResult]
    cost: Cost
    decays: Sequence[SweepResult]
    """With each weight decay; the answer is about the first."""
    coordinates: CoordinateCheck | None = None
    """None if it was left out, or nothing could be measured."""
    command: str = ""

    @classmethod
    def of(cls, transfer: Mapping[str, Any]) -> Self:
        """Read plain values."""
        values = fields_of(cls, transfer)
        values["models"] = [ModelResult(**fields_of(ModelResult, model)) for model in transfer["models"]]
        values["cost"] = Cost(**fields_of(Cost, transfer["cost"]))
        values["decays"] = [SweepResult.of(sweep) for sweep in transfer["decays"]]
        check = transfer["coordinates"]
        values["coordinates"] = CoordinateCheck.of(check) if check and check.get("rows") else None
        return cls(**values)

    @property
    def scales_itself(self) -> bool:
        """Whether the setup gives every size a rate of its own."""
        return len({model.rate for model in self.models}) > 1
