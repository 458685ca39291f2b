"""Faults planted in small trainings, and what the flight recorder says of each.

    python benchmarks/planted.py             # print the reports
    python benchmarks/planted.py --write     # write docs/flight-recorder.md, too

A fault is planted from outside, as code of a user's would do it: by a hook on the model or the optimizer, or
by a task whose batches are changed. The product has no option for it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import probing
from normlab.diagnosis import PRESETS
from normlab.lab.config import Config, DataConfig, MachineConfig, ModelConfig, OptimConfig, TrainConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs import RunFolder
from normlab.lab.tasks import TASKS
from normlab.lab.training import replay, trainer
from normlab.lab.training.devices import prepare_process
from normlab.lab.training.run import Run
from normlab.lab.training.trainer import AnyTask, Trainer
from normlab.optim import build_optimizer
from normlab.watching import fault as rules
from normlab.watching import recorder, spikes
from normlab.watching.flight import Trigger, report_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/flight-recorder.md"
STEPS, FROM = 100, 60
CHECKPOINT_EVERY = 50
LR, HIGH_LR = 2e-3, 3e-2
BRANCH = "decoder.sublayers.2.f"
LAYER = "encoder.sublayers.1"
Plant = Callable[[AnyTask], AbstractContextManager[object]]


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


def fast_layer(task: AnyTask) -> AbstractContextManager[object]:
    """One sublayer's weights in a parameter group of their own, whose rate is a thousand times larger."""

    def build(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
        optimizer = build_optimizer(model, config)
        inside = {id(p) for name, p in model.named_parameters() if name.startswith(f"{LAYER}.")}
        for group in list(optimizer.param_groups):
            fast = {**group, "lr": group["lr"].clone(), "rate": 1000 * group["rate"]}
            fast["params"] = [p for p in group["params"] if id(p) in inside]
            group["params"] = [p for p in group["params"] if id(p) not in inside]
            optimizer.param_groups.append(fast)
        return optimizer

    return patch.object(trainer, "build_optimizer", build)


def numbered(task: AnyTask) -> list[int]:
    """A list whose only item is the step that a trainer of this task is in."""
    whole, now = task.batch, [0]

    def batch(index: int) -> Any:
        now[0] = index + 1
        return whole(index)

    task.batch = batch
    return now


def nan_weight(task: AnyTask) -> AbstractContextManager[object]:
    """Not a number in one weight, from that step on."""
    now, whole = numbered(task), task.loss

    def loss(model: Any, batch: Any) -> Any:
        if now[0] == FROM:
            with torch.no_grad():
                model.get_submodule(f"{BRANCH}.inner").weight[3, 5] = torch.nan
        return whole(model, batch)

    task.loss = loss
    return nullcontext()


def loud_branch(task: AnyTask) -> AbstractContextManager[object]:
    """A branch whose output is a hundred times as large."""
    now, whole = numbered(task), task.build

    def louder(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 100 if module.training and now[0] >= FROM else output

    def build() -> Any:
        model = whole()
        model.get_submodule(BRANCH).register_forward_hook(louder)
        return model

    task.build = build
    return nullcontext()


def shuffled_labels(task: AnyTask) -> AbstractContextManager[object]:
    """The tokens to predict belong to other sentences of the batch, and stand at other places."""
    whole = task.batch

    def batch(index: int) -> Any:
        found = whole(index)
        if index < FROM - 1:
            return found
        order = torch.randperm(found.target_out.numel(), generator=torch.Generator().manual_seed(index))
        mixed = found.target_out.flatten()[order].view_as(found.target_out)
        return replace(found, target_out=mixed)

    task.batch = batch
    return nullcontext()


def nothing(task: AnyTask) -> AbstractContextManager[object]:
    """No fault."""
    return nullcontext()


@dataclass(frozen=True)
class Fault:
    """A fault in words and in code; ``right`` is what a report should name."""

    name: str
    words: str
    plant: Plant
    right: str
    lr: float = LR
    betas: tuple[float, float] = OptimConfig().betas


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
        nothing,
        "no single module: all updates are too large",
        HIGH_LR,
        (0.9, 0.5),
    ),
)


def flown(fault: Fault, root: Path) -> tuple[Run, list[dict[str, Any]]]:
    """A training with this fault, and the recorder's reports; where it wrote none it is asked for one."""
    wanted = config(fault.lr)
    kind = TASKS[wanted.task]
    data, corpus = kind.prepare(wanted.data, root / "data")
    wanted = replace(wanted, data=data, optim=replace(wanted.optim, betas=fault.betas))
    folder = RunFolder.create(root / fault.name, wanted)
    task = kind(wanted, corpus, torch.device("cpu"))
    with fault.plant(task):
        run = Run(Trainer(task), folder).resume()
        run.train()
        if not folder.flights():
            step = run.progress.step
            asked = Trigger("asked", step, step, "asked for at the end")
            answer = replay.replay(task, folder, step, watched=STEPS, history=folder.metrics())
            folder.add_flight(report_of(step, asked, answer, answer.records))
    return run, folder.flights()


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


def ended(run: Run) -> str:
    """The run's outcome in a sentence."""
    outcome = run.stopping.outcome
    return f"{outcome.state} at step {outcome.step}: {outcome.evidence}" if outcome else "no outcome"


def table(kept: Sequence[tuple[Fault, Run, list[dict[str, Any]]]]) -> Iterator[str]:
    """Markdown lines: what was planted, and whom the first report names."""
    yield "| planted | right would be | the run | written | named |"
    yield "| --- | --- | --- | --- | --- |"
    for fault, run, reports in kept:
        verdict, trigger = reports[0]["verdict"], reports[0]["trigger"]
        named = f"`{verdict['module']}`, step {verdict['step']}" if verdict["module"] else verdict["sentence"]
        outcome = run.stopping.outcome
        state = outcome.state if outcome else "open"
        yield f"| {fault.name} | {fault.right} | {state} | {trigger['kind']} | {named} |"


def page(kept: Sequence[tuple[Fault, Run, list[dict[str, Any]]]]) -> str:
    """``docs/flight-recorder.md``."""
    reports: list[str] = []
    for fault, run, written in kept:
        reports += [f"### {fault.name}", "", f"Planted: {fault.words} Right would be: {fault.right}.", ""]
        reports += [f"The run: {ended(run)}.", ""]
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
        "ring": recorder.RING,
        "watched": replay.WATCHED,
        "left": f"{rules.LEFT:g}",
        "few": f"{rules.FEW:g}",
        "recent": recorder.RECENT,
        "nats": spikes.SPIKE_NATS,
        "about": costs["about"],
        "presets": "\n".join(presets),
        "every": MachineConfig().probe_every_steps,
        "default": MachineConfig().probes,
    }


MEASURED = {
    "cheap": (
        "rms of the stream after each sublayer; of each sublayer, and of what lies outside of all, the "
        "gradient norm before clipping and one step's update relative to the weights"
    ),
    "standard": (
        "and rms of the stream before each sublayer, of its branch and of the gradient in its output; "
        "updates by kind of matrix: query, key, value, output, ffn_in, ffn_out"
    ),
    "full": (
        "and how alike tokens are (mean cosine), the gradient of branches, and of every module in a branch, "
        "projections of queries and keys among them, the largest entry and the share of zeros"
    ),
}

TEXT = """# Probes in training, and the flight recorder

This page shows what probes and the flight recorder reveal about a training, what they cost, and
which planted faults they find.

The page is written by `python benchmarks/planted.py --write`; its costs come from
`python benchmarks/probing.py --write`.

## Probes

`--probes cheap|standard|full` measures the model while it trains: in the first step, and in every
step that `--probe-every-steps` divides ({every}). The default is `{default}`; `--probes ''` measures nothing.
Observation is one-way: metrics and weights are bit-identical with and without it, the run's id is
the same, and between two measured steps there is no hook on the model. A step of several
micro-batches is measured on its first one. The run folder's `probes.jsonl` has rows of `step`,
`stack`, `index`, `module`, `signal`, `statistic`, `value`; `normlab run report RUN` draws them.
Entropy and logits of attention are not measured in training, because its weights are inside a
kernel: `normlab diagnose RUN` has them. To watch a training that another loop or trainer runs, use
`normlab.watch`: see [trainings elsewhere](integrations.md).

{presets}

3+3 layers of width 256, 2,048 positions a step, {about}.
The same step is done in each of these ways in turn, in one process; differences smaller than the distance
between the quartiles are noise:

{costs}

In every step the recorder keeps a copy of the weights, to know how far each parameter moved. The
last row is that work, timed by itself. Presets are compared with the step that is recorded.

## The recorder

The recorder always keeps the last {ring} steps: learning rate, loss, gradient norm, and for each
parameter the norms of gradient and update, on the device. It writes a report

- when a loss or a gradient norm is not finite, or the run's outcome is *diverged*;
- at a spike, once a run: the median loss of {recent} steps is above every kept step before them, of which
  there must be at least as many, and {nats} nats above their median. If training recovers before the
  next checkpoint, the spike becomes a note with its step, and nothing is done again;
- when it is asked, by `normlab diagnose RUN --flight` or from Python:
  `normlab.lab.training.replay.examine("runs/<id>", step)`, which does the run's steps again.

`watching/recorder.py` decides when, and `lab/training/outcome.py` whether a run has diverged.

A report is an entry of the run folder's `flight.json`: the kept steps, and what went wrong first. To
find that, the recorder does the steps from the last checkpoint on again (from the start if there is
none before the bad step), at most as many as lie between two checkpoints. In the last {watched} of them it
watches every module. Every random draw is derived from (seed, purpose, step, micro-batch), so the
steps come out as they did before; where they do not, the report says so and names no module. Then
the training goes on as if nothing had happened. The report names

1. a parameter that is already not finite in the checkpoint;
2. else the first module, in forward order, whose output is not finite while its input is;
3. else the first, in backward order, whose gradient is not finite; then a parameter whose gradient
   or update is not;
4. else the first statistic above {left} (1 + {few}/n) times its median of the n steps before: the rms of an
   output, that of the gradient in an output relative to the loss's own in the model's output, or an
   update divided by the learning rate; within a step, in the order of the stream;
5. else no module: *no module left its range: look at the data, the labels or the loss*, or, of a run
   that trained, *no module left its range in these steps, and the run trained*.

The recorder has three blind spots. A fault that is there from the first step on has no steps before
it, unless it grows. A fault that is everywhere at once (a rate that is too high for all) still has a
first module to leave its range; that one is named, although it is no more at fault than the others.
And whatever touches the model only once, from outside, does not come again in a replay.

## Planted faults

{size}.

Faults are planted from outside, by hooks and changed batches. A run that wrote no report by itself was
asked at its end: it did all its steps again, with every module watched. The reports are as they came out.

{table}

{reports}"""


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
