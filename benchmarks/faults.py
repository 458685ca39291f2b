"""Faults planted in small trainings, and what the flight recorder says of each.

    python benchmarks/faults.py             # print the reports
    python benchmarks/faults.py --write     # write docs/flight-recorder.md, too

A fault is planted from outside, as code of a user's would do it: by a hook on the model or the optimiser, or
by a task whose batches are changed. The product has no option for it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import probing
from normlab.recipes.grammar import resolve
from normlab.spec.config import Config, DataConfig, MachineConfig, ModelConfig, OptimConfig, TrainConfig
from normlab.store import RunFolder
from normlab.tasks.registry import TASKS
from normlab.training.callbacks import blame, flight
from normlab.training.callbacks.flight import Trigger
from normlab.training.callbacks.probing import PRESETS
from normlab.training.devices import prepare_process
from normlab.training.trainer import Loop

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/flight-recorder.md"
STEPS, FROM = 100, 60
CHECKPOINT_EVERY = 50
LR, HIGH_LR = 2e-3, 3e-2
BRANCH = "decoder.sublayers.2.f"
LAYER = "encoder.sublayers.1"
Plant = Callable[[Loop], None]


def config(lr: float = LR) -> Config:
    """2+2 layers of width 64 on the built-in corpus, Pre-LN, no warm-up, a constant rate."""
    base = Config(
        model=ModelConfig(dim=64, ffn_dim=128, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.1),
        data=DataConfig(builtin_pairs=2000, vocab_size=300),
        optim=OptimConfig(lr=lr, schedule="constant"),
        train=TrainConfig(
            steps=STEPS,
            max_tokens=1024,
            validate_every_steps=STEPS,
            dev_decode_sentences=10,
            precision="fp32",
        ),
        machine=MachineConfig(
            threads=1, log_every_steps=5, checkpoint_every_steps=CHECKPOINT_EVERY, probes=""
        ),
    )
    return resolve("pre", base)


def fast_layer(loop: Loop) -> None:
    """One sublayer's weights in a parameter group of their own, whose rate is a thousand times larger."""
    (group,) = loop.optimiser.param_groups
    chosen = {id(p) for p in loop.model.get_submodule(LAYER).parameters()}
    own = [p for p in group["params"] if id(p) in chosen]
    group["params"] = [p for p in group["params"] if id(p) not in chosen]
    fast = {**group, "params": own, "lr": group["lr"].clone()}
    loop.optimiser.param_groups.append(fast)

    def faster(*_: Any) -> None:
        fast["lr"].mul_(1000)

    loop.optimiser.register_step_pre_hook(faster)


def nan_weight(loop: Loop) -> None:
    """Not a number in one weight, from the batch of that step on."""
    whole = loop.task.batch

    def batch(index: int) -> Any:
        if index == FROM - 1:
            with torch.no_grad():
                loop.model.get_submodule(f"{BRANCH}.inner").weight[3, 5] = torch.nan
        return whole(index)

    loop.task.batch = batch


def loud_branch(loop: Loop) -> None:
    """A branch whose output is a hundred times as large."""

    def louder(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 100 if module.training and loop.progress.step >= FROM else output

    loop.model.get_submodule(BRANCH).register_forward_hook(louder)


def shuffled_labels(loop: Loop) -> None:
    """What is to be predicted belongs to another sentence of the batch, at another place."""
    whole = loop.task.batch

    def batch(index: int) -> Any:
        found = whole(index)
        if index < FROM - 1:
            return found
        order = torch.randperm(found.target_out.numel(), generator=torch.Generator().manual_seed(index))
        mixed = found.target_out.flatten()[order].view_as(found.target_out)
        return replace(found, target_out=mixed)

    loop.task.batch = batch


def short_memory(loop: Loop) -> None:
    """beta2 = 0.5, at a high learning rate."""
    for group in loop.optimiser.param_groups:
        group["betas"] = (0.9, 0.5)


@dataclass(frozen=True)
class Fault:
    """What is planted, in words and in code; ``right`` is what a report should name."""

    name: str
    words: str
    plant: Plant
    right: str
    lr: float = LR


def nothing(loop: Loop) -> None:
    """A sound training."""


FAULTS = (
    Fault("Nothing", "Nothing.", nothing, "no module"),
    Fault(
        "One layer's learning rate x1000",
        f"`{LAYER}` has a thousand times the learning rate of the others, from the first step on.",
        fast_layer,
        f"`{LAYER}`",
    ),
    Fault(
        "A NaN in one weight",
        f"`{BRANCH}.inner.weight[3, 5]` becomes NaN as step {FROM} begins.",
        nan_weight,
        f"`{BRANCH}.inner`",
    ),
    Fault(
        "A branch multiplied by 100",
        f"The output of `{BRANCH}` is multiplied by 100 in training from step {FROM} on.",
        loud_branch,
        f"`{BRANCH}`",
    ),
    Fault(
        "Labels shuffled",
        f"From step {FROM} on the tokens to predict are in random order within each batch.",
        shuffled_labels,
        "no module, but data, labels or loss",
    ),
    Fault(
        "beta2 = 0.5 at a high learning rate",
        f"Adam's beta2 is 0.5 and the learning rate {HIGH_LR:g}, without warm-up, from the first step on.",
        short_memory,
        "no single module: all updates are too large",
        HIGH_LR,
    ),
)


def flown(fault: Fault, root: Path) -> tuple[Loop, list[dict[str, Any]]]:
    """A training with this fault, and the recorder's reports; where it had nothing to say it is asked."""
    wanted = config(fault.lr)
    kind = TASKS[wanted.task]
    data, corpus = kind.prepare(wanted.data, root / "data")
    wanted = replace(wanted, data=data)
    folder = RunFolder.create(root / fault.plant.__name__, wanted)
    loop = Loop(kind(wanted, corpus, torch.device("cpu")), folder, lambda row: None)
    fault.plant(loop)
    loop.run(threading.Event())
    if not folder.flights():
        asked = Trigger("asked", loop.progress.step, loop.progress.step, "asked for at the end")
        loop.recorder.report(asked, watched=STEPS, most=STEPS)
    return loop, folder.flights()


def said(report: dict[str, Any]) -> list[str]:
    """One report as markdown lines."""
    verdict, trigger, replay = report["verdict"], report["trigger"], report["replay"]
    begun = f"checkpoint of step {replay['from_step']}" if replay["checkpoint"] else "first step"
    same = {True: "every known loss as before", False: "not as before", None: "no known loss to compare with"}
    return [
        f"Written in step {report['step']} ({trigger['kind']}: {trigger['words']}):",
        "",
        f"> {verdict['sentence']}",
        "",
        *(f"- {line}" for line in verdict["evidence"]),
        f"- done again from the {begun}: {same[replay['agrees']]}",
        "",
    ]


def ended(loop: Loop) -> str:
    """The run's outcome in a sentence."""
    outcome = loop.outcome
    return f"{outcome.state} at step {outcome.step}: {outcome.evidence}" if outcome else "no outcome"


def table(kept: Sequence[tuple[Fault, Loop, list[dict[str, Any]]]]) -> Iterator[str]:
    """Markdown lines: what was planted, and whom the first report names."""
    yield "| planted | right would be | the run | written | named |"
    yield "| --- | --- | --- | --- | --- |"
    for fault, loop, reports in kept:
        verdict, trigger = reports[0]["verdict"], reports[0]["trigger"]
        named = f"`{verdict['module']}`, step {verdict['step']}" if verdict["module"] else verdict["sentence"]
        state = loop.outcome.state if loop.outcome else "open"
        yield f"| {fault.name} | {fault.right} | {state} | {trigger['kind']} | {named} |"


def page(kept: Sequence[tuple[Fault, Loop, list[dict[str, Any]]]]) -> str:
    """``docs/flight-recorder.md``."""
    reports: list[str] = []
    for fault, loop, written in kept:
        reports += [f"### {fault.name}", "", f"Planted: {fault.words} Right would be: {fault.right}.", ""]
        reports += [f"The run: {ended(loop)}.", ""]
        reports += [line for report in written for line in said(report)]
    kept_costs = json.loads(probing.RESULTS.read_text(encoding="utf-8"))
    costs = "\n".join(probing.table(kept_costs["seconds"]))
    size = (
        f"2+2 layers of width 64, Pre-LN, {STEPS} steps of 1,024 positions of the built-in corpus, Adam at a "
        f"constant {LR:g} without warm-up, a checkpoint every {CHECKPOINT_EVERY} steps, one thread, one seed"
    )
    return TEXT.format(
        table="\n".join(table(kept)), reports="\n".join(reports), costs=costs, size=size, **facts(kept_costs)
    )


def facts(costs: dict[str, Any]) -> dict[str, object]:
    """The constants that the page names."""
    presets = ["| preset | what a measured step records |", "| --- | --- |"]
    presets += [f"| `{name}` | {MEASURED[name]} |" for name in PRESETS]
    return {
        "ring": flight.RING,
        "watched": flight.WATCHED,
        "left": f"{blame.LEFT:g}",
        "few": f"{blame.FEW:g}",
        "recent": flight.RECENT,
        "nats": flight.SPIKE_NATS,
        "about": costs["about"],
        "presets": "\n".join(presets),
        "every": MachineConfig().probe_every_steps,
        "default": MachineConfig().probes,
    }


MEASURED = {
    "cheap": (
        "rms of the stream after each sublayer (`after`); of each sublayer, and of the modules outside of "
        "all, the gradient norm before clipping (`grad`) and one step's update relative to the weights "
        "(`update`)"
    ),
    "standard": (
        "and rms of the stream before each sublayer (`before`), of its branch (`branch`) and of the gradient "
        "in its output (`grad_after`); norms of weights (`weight`); updates by kind of matrix: query, key, "
        "value, output, ffn_in, ffn_out"
    ),
    "full": (
        "and the largest entry of the stream, the share of it that is not finite and the mean cosine of its "
        "tokens; the gradient of branches (`grad_branch`); and of every module in a branch, projections of "
        "queries and keys among them, the largest entry and the share of zeros"
    ),
}

TEXT = """# Probes in training, and the flight recorder

This page is written by `python benchmarks/faults.py --write`; its costs come from `python
benchmarks/probing.py --write`.

## Probes

`--probes cheap|standard|full` measures the model while it trains, in the first step and in every one that
`--probe-every-steps` divides ({every}); `--probes ''` measures nothing, the default is `{default}`.
Observation is one-way: metrics and weights are bit-identical with and without, the run's id is the same, and
between two measured steps there is no hook on the model. With accumulation the first micro-batch is measured.
Rows of `step`, `stack`, `index`, `module`, `signal`, `statistic`, `value` lie in the run folder's
`probes.jsonl`; `normlab report RUN` draws them. Entropy and logits of attention are not measured in training,
because its weights are inside a kernel: `normlab diagnose RUN` has them.

{presets}

3+3 layers of width 256, 2,048 positions a step, {about}. The same step is done in these ways in turn, in one
process; differences smaller than the quartiles' distance are noise:

{costs}

The recorder keeps a copy of the weights to know by how much each parameter moved, in every step: the last row
is that work, timed by itself. Presets are compared with the step that is recorded.

## The recorder

It always keeps the last {ring} steps: learning rate, loss, gradient norm, and by parameter the norms of
gradient and update, on the device. It writes a report

- when a loss or a gradient norm is not finite, or the run's outcome is *diverged*; - at a spike, once a run:
the middle loss of {recent} steps is above every kept step before them, at least as many, and {nats} nats
above their middle one; - when it is asked, by `normlab diagnose RUN --flight` or from Python:
`normlab.training.replay.examine("runs/<id>", step)`, which does the run's steps again.

A report is an entry of the run folder's `flight.json`: the kept steps, and who went wrong first. For that the
steps from the last checkpoint on are done again, from the start where there is none before the bad step, at
most as many as lie between two checkpoints; in the last {watched} of them every module is watched. Every
random draw is derived from (seed, purpose, step, micro-batch), so that they come out as they did; where they
do not, the report says so and blames nobody. Then the training goes on as if nothing had been. Named is

1. a parameter that is not finite in the checkpoint already; 2. else the first module, in forward order, whose
output is not finite while its input is; 3. else the first, in backward order, whose gradient is not finite;
then a parameter whose gradient or update is not; 4. else the first statistic above {left} (1 + {few}/n) times
its median of the n steps before: rms of an output, of the gradient in an output relative to the loss's own in
the model's output, update by the learning rate; within a step in the order of the stream; 5. else nobody: *no
module left its range: look at the data, the labels or the loss*.

What it cannot see: a fault that is there from the first step on has no steps before it, unless it grows; one
that is everywhere at once (a rate that is too high for all) still has a first module to leave its range,
which is named although it is no more at fault than the others; and what touches the model only once, from
outside, does not come again in a replay.

## Planted faults

{size}.

Faults are planted from outside, by hooks and changed batches. A run with no report of its own was asked at
its end: it did all its steps again, with every module watched. The reports are as they came out.

{table}

{reports}
"""


def main() -> None:
    """Fly all of them, and a sound training beside."""
    parser = argparse.ArgumentParser(description="Planted faults, and the flight recorder's reports.")
    parser.add_argument("--write", action="store_true", help="write docs/flight-recorder.md")
    args = parser.parse_args()
    prepare_process(MachineConfig(threads=1))
    with tempfile.TemporaryDirectory() as root:
        kept = [(fault, *flown(fault, Path(root))) for fault in FAULTS]
    print("\n".join(table(kept)))
    if args.write:
        PAGE.write_text(page(kept).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
