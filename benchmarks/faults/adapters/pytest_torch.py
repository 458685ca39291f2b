"""pytest-torch: its checks of inference and of training loops that need no other hardware or compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from training import Finding, NotCalledError, PublicCase, Training, WithLoss, training

PACKAGE = "pytest-torch"
HOW = (
    "the inference contract, layouts, padding and masks where the model takes them, a checkpoint read back, "
    "gradients, frozen parameters, coverage, 20 steps, one batch learnt by heart, resuming; assertions count"
)
ASKS_PLACE = False
STATES = {
    "batch_invariance": ("rows",),
    "deterministic": ("modes", "seeds"),
    "finite_outputs": ("finite",),
    "no_state_mutation": ("buffers", "state", "modes"),
    "padding_invariant": ("padding", "counted"),
    "mask_invariant": ("padding",),
    "layout_invariant": ("order",),
    "checkpoint_roundtrip": ("checkpoints", "buffers", "kind: checkpoints", "kind: resuming"),
    "gradients_finite": ("finite",),
    "all_params_receive_grad": ("gradients", "reach", "frozen"),
    "frozen": ("frozen",),
    "optimizer_coverage": ("optimizer_coverage", "kind: self-distillation"),
    "healthy": ("finite", "step", "optimizer_coverage"),
    "loss_decreases": ("learns", "step"),
    "overfits_one_batch": ("learns", "gradients"),
    "resume_equivalent": ("checkpoints", "schedule", "kind: checkpoints", "kind: resuming"),
}


def states(check: str) -> tuple[str, ...]:
    """Return the causes that an assertion states by its documentation, faults of resuming included."""
    return STATES.get(check, ())


def asserted(check: str, call: Callable[[], object]) -> Iterator[Finding]:
    """Give what an assertion fails with; one that cannot be made of this case says nothing."""
    torch.manual_seed(0)
    try:
        call()
    except AssertionError as failed:
        yield Finding(check, "", str(failed)[:300])
    except TimeoutError:
        raise
    except Exception:
        return


def made(case: PublicCase) -> Any:
    """Return the setup of a case as the tool has it, with the case in its state for the step."""
    from pytest_torch import TrainingSetup

    built = training(case)
    setup = TrainingSetup(built.model, built.optimizers, built.scheduler)
    setup.case = built
    return setup


def case_step(setup: Any, batch: Any) -> Tensor:
    """Make one step of the case's own, whose batch is always the same."""
    return setup.case.step()


def of_inference(case: PublicCase) -> Iterator[Finding]:
    """Give what is said of the model in evaluation, called as the loss calls it."""
    import pytest_torch as tool

    given = training(case)
    inputs = given.inputs()
    model = given.model.eval()
    report = tool.check_inference_contract(model, inputs, raise_on_failure=False)
    for result in report.failures:
        yield Finding(result.name, "", result.message[:300])
    yield from asserted("layout_invariant", partial(tool.assert_layout_invariant, model, inputs))
    yield from of_padding(model, inputs, given.arguments.get("declare", {}).get("pad_id", 0))
    fresh = partial(getattr, training(case), "model")
    read_back = partial(tool.assert_checkpoint_roundtrip, fresh, inputs, model=model)
    yield from asserted("checkpoint_roundtrip", read_back)


def of_padding(model: torch.nn.Module, inputs: dict[str, Any], pad_id: int) -> Iterator[Finding]:
    """Give what is said of padding where the model takes token ids and a mask of their shape."""
    import pytest_torch as tool

    tensors = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and each.dim() == 2}
    masks = [name for name in tensors if "mask" in name]
    ids = [name for name, each in tensors.items() if name not in masks and each.dtype == torch.long]
    if not masks or not ids or tensors[masks[0]].shape != tensors[ids[0]].shape:
        return
    names = {"ids_key": ids[0], "mask_key": masks[0]}
    more = partial(tool.assert_padding_invariant, model, inputs, pad_value=pad_id, **names)
    yield from asserted("padding_invariant", more)
    yield from asserted("mask_invariant", partial(tool.assert_mask_invariant, model, inputs, **names))


def of_gradients(case: PublicCase, given: Training) -> Iterator[Finding]:
    """Give what is said of the model and its loss as one module."""
    import pytest_torch as tool

    def ask(check: str, assertion: Callable[..., object], *more: object) -> Iterator[Finding]:
        whole = WithLoss(training(case)).train()
        return asserted(check, partial(assertion, whole, (), lambda loss: loss, *more))

    yield from ask("gradients_finite", tool.assert_gradients_finite)
    yield from ask("all_params_receive_grad", tool.assert_all_params_receive_grad)
    frozen = [f"model.{glob}" for glob in given.arguments.get("declare", {}).get("frozen", ())]
    if frozen:
        yield from ask("frozen", tool.assert_frozen, frozen)
    yield from ask("overfits_one_batch", tool.assert_overfits_one_batch)


def of_the_loop(case: PublicCase, given: Training) -> Iterator[Finding]:
    """Give what is said of steps of the case's own."""
    import pytest_torch as tool

    covered = partial(tool.assert_optimizer_coverage, given.model, given.optimizers)
    yield from asserted("optimizer_coverage", covered)
    run = tool.run_training(partial(made, case), given.batch, case_step)
    yield from asserted("healthy", run.assert_healthy)
    yield from asserted("loss_decreases", run.assert_loss_decreases)
    resumed = partial(tool.assert_resume_equivalent, partial(made, case), given.batch, case_step)
    yield from asserted("resume_equivalent", resumed)


def findings(case: PublicCase) -> list[Finding]:
    """Ask for all; a model that is never called whole is asked about its loss and its steps alone."""
    given = training(case)
    told: list[Finding] = []
    with suppress(NotCalledError):
        told += of_inference(case)
    return [*told, *of_gradients(case, given), *of_the_loop(case, given)]
