"""What a check took the step to be, in words, for the reader to confirm or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from normlab.errors import in_one_line
from normlab.trace.budget import Deadline, OutOfTimeError, passes_until
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import place_name, tensors_in


def describe(step: StepUnderTest) -> dict[str, str]:
    """Return what the step was taken to be, by the name of the fact, as far as time allows."""
    description = {"parameters": f"{step.size:,}"}
    # anybody's model: it may raise when it is called again
    with suppress(Exception, OutOfTimeError), passes_until(Deadline(step.ends)):
        facts = step.facts
        for name, describe_fact in _DESCRIBED.items():
            description[name] = "unknown"
            with suppress(Unknown):
                description[name] = describe_fact(facts)
        description["stacks"] = _stacks(step)
        if batch := tested_batch(step):
            description["batch"] = batch
        description["precision"] = _precision(step)
    return description


@dataclass(frozen=True)
class ReadFact:
    """A fact of a step: its value in words, or else why it is not known."""

    name: str
    value: str
    why_unknown: str = ""


def read_facts(step: StepUnderTest) -> Iterator[ReadFact]:
    """Yield the facts that properties ask for, with the reasons why some are not known."""
    try:
        facts = step.facts
    except Exception as error:  # anybody's model: it may raise when it is called again
        yield ReadFact("facts", "", in_one_line(error))
        return
    for name, describe_fact in (_DESCRIBED | _ALSO_READ).items():
        try:
            yield ReadFact(name, describe_fact(facts))
        except Unknown as reason:
            yield ReadFact(name, "", str(reason))
        except Exception as error:
            yield ReadFact(name, "", in_one_line(error))
    yield ReadFact("stacks", _stacks(step))


def tested_batch(step: StepUnderTest) -> str:
    """Return which part of the batch is tested, or why all of a large one is; empty for a small one."""
    if step.why_whole:
        return f"all of it: {step.why_whole}"
    return _part(step) if step.tests_a_part else ""


def _tokens(facts: Facts) -> str:
    return f"{place_name(facts.tokens.place)} {list(facts.tokens.ids.shape)}"


def _logits(facts: Facts) -> str:
    return f"{facts.logits.where} {list(facts.logits.shape)}"


def _targets(facts: Facts) -> str:
    return "no inputs" if facts.shift is None else f"{facts.shift} ahead"


def _padding(facts: Facts) -> str:
    return f"{facts.padding.side}, by {facts.padding.source}"


def _documents(facts: Facts) -> str:
    return f"{int(facts.documents.max()) + 1} in a row"


_DESCRIBED: dict[str, Callable[[Facts], str]] = {
    "tokens": _tokens,
    "logits": _logits,
    "targets": _targets,
    "padding": _padding,
    "documents": _documents,
}


def _causal(facts: Facts) -> str:
    answer = "yes" if facts.causal else "no"
    return f"{answer}, as declared" if facts.declared.causal is not None else f"{answer}, by the targets"


def _counted(facts: Facts) -> str:
    return f"{int(facts.counted.sum())} of {facts.counted.numel()} positions"


_ALSO_READ: dict[str, Callable[[Facts], str]] = {"causal": _causal, "counted": _counted}


def _stacks(step: StepUnderTest) -> str:
    root = type(step.model).__name__  # whose own children may be the blocks, as a Sequential's are
    stacks = [f"{name or root} × {len(blocks)}" for name, blocks in step.facts.stacks.items()]
    return ", ".join(stacks) or "none"


def _part(step: StepUnderTest) -> str:
    """Say which part of the batch stands for all of it, by its largest tensor."""
    part = dict(tensors_in(step.unchanged.batch))
    whole_batch = dict(tensors_in(step.on_whole_batch.batch))
    place = max(part, key=lambda place: whole_batch[place].numel())
    sentence = f"the part {list(part[place].shape)} of {list(whole_batch[place].shape)}"
    return f"{sentence}, and once all of it" if step.estimates.reaches_whole_batch else sentence


def _precision(step: StepUnderTest) -> str:
    if not step.is_exact:
        return "the model's own"
    narrow = sorted(str(dtype).removeprefix("torch.") for dtype in step.comparison.narrowed)
    return f"float64, in part {', '.join(narrow)}" if narrow else "float64"
