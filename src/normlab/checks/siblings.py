"""Properties of what is built alike: settings of blocks, and parameters that are one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normlab.checks.fresh import drawn_by_class, fresh
from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.checks.structure import odd_one
from normlab.trace.facts.stacks import Block, common
from normlab.trace.functions import FunctionCall

Answers = Iterator[Violation | Note]
Values = dict[tuple[str, str], dict[str, Any]]
"""By module within a block and attribute, its value by block."""


# ---------------------------------------------------------------------------------------------- siblings
@property_of(
    "structure", explains=["precision", "training_equals_evaluation", "evaluation_repeats"], passes=3
)
def siblings(step: Step) -> Answers:
    """Blocks that look alike have the same types, settings and mode.

    Blocks look alike that hold parameters of the same names and shapes. A plain attribute of a module, a
    number, a word or a switch, that differs in one block alone is a slip; in the first or the last it may be
    meant, and so is what the model's own class builds so.
    """
    yield from _modes(step)
    for blocks in step.facts.stacks.values():
        ran = [b for b in blocks if step.facts.called[b.path]]
        kinds = {b.path: _types(step.model, b) for b in ran}
        odd = odd_one(kinds)
        if odd is not None:
            rest = next(v for p, v in kinds.items() if p != odd)
            yield fail(odd, f"its parameters are {kinds[odd]}, those of the other blocks {rest}",
                       "keep all blocks in one type")  # fmt: skip
            return
        for alike in _alike(ran):
            answers = list(_settings(step, alike))
            yield from answers
            if any(isinstance(a, Violation) for a in answers):
                return


def _types(model: nn.Module, block: Block) -> str:
    module = model.get_submodule(block.path)
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()}))


def _alike(blocks: list[Block]) -> list[list[Block]]:
    groups: dict[Any, list[Block]] = defaultdict(list)
    for b in blocks:
        groups[tuple((n, p.shape) for n, p in b.module.named_parameters())].append(b)
    return [g for g in groups.values() if len(g) >= 3]


def _settings(step: Step, blocks: list[Block]) -> Answers:
    ends = (blocks[0].path, blocks[-1].path)
    for (inner, name), values in _table(step.model, blocks).items():
        odd = odd_one(values) if len(values) == len(blocks) else None
        if odd is None or _built_so(step, f"{odd}.{inner}".rstrip("."), name, values[odd]):
            continue
        rest = next(v for p, v in values.items() if p != odd)
        place = f"{odd}.{inner}".rstrip(".")
        say = f"its {name} is {values[odd]}, in the {len(values) - 1} other blocks {rest}"
        number = isinstance(rest, float) and isinstance(values[odd], float) and values[odd] != 0
        if number or (odd not in ends and len(values) > 3):
            yield fail(place, say, "build all blocks alike")
            return
        yield note(place, say)


def _table(model: nn.Module, blocks: list[Block]) -> Values:
    table: Values = defaultdict(dict)
    for b in blocks:
        for inner, module in model.get_submodule(b.path).named_modules():
            table[inner, "class"][b.path] = type(module).__name__
            for name, value in vars(module).items():
                plain = value is None or isinstance(value, (bool, int, float, str))
                if plain and name != "training":
                    table[inner, name][b.path] = value
                elif callable(value) and hasattr(value, "__name__"):
                    table[inner, name][b.path] = value.__name__
    return table


def _built_so(step: Step, path: str, name: str, value: Any) -> bool:
    """Whether the model, drawn anew by its own class, has this setting."""
    try:
        module = fresh(step, 101).get_submodule(path)
    except (Untestable, AttributeError):
        return False
    own = type(module).__name__ if name == "class" else getattr(module, name, None)
    return drawn_by_class(step) and getattr(own, "__name__", own) == value


def _modes(step: Step) -> Answers:
    """A module that draws something in training stands in evaluation mode in a model that does not."""
    if not step.model.training:
        return
    resting = [n for n, m in step.model.named_modules() if not m.training and _learns(step.model, n)]
    if not resting:
        return
    names = ("dropout", "batch_norm", "scaled_dot_product_attention")
    drawing = {c.module for c in step.plain.again(training=True).functions(*names) if _draws(c)}
    odd = [n for n in resting if any(d == n or d.startswith(f"{n}.") for d in drawing)]
    if odd:
        yield fail(common(odd), f"{len(odd)} modules are in evaluation mode in a model in training mode",
                   "call model.train() once it is built")  # fmt: skip


def _learns(model: nn.Module, path: str) -> bool:
    """Whether the smallest part around a module that has parameters is trained."""
    while True:
        held = list(model.get_submodule(path).parameters())
        if held or not path:
            return any(p.requires_grad for p in held)
        path = path.rpartition(".")[0]


def _draws(call: FunctionCall) -> bool:
    if call.name == "batch_norm":
        return bool(call.argument(5, "training", False))
    if call.name == "dropout":
        return bool(call.argument(1, "p", 0.5)) and bool(call.argument(2, "training", True))
    return bool(call.argument(4, "dropout_p", 0.0))


# -------------------------------------------------------------------------------------------------- ties
@property_of("structure", explains=["start", "seeds", "initial_loss"], passes=0)
def ties(step: Step) -> Answers:
    """Parameters are shared as declared or configured, and none is a copy of another one.

    The head's matrix is the table of the embedding where ``tied`` (declared, or the configuration's
    ``tie_word_embeddings``) says so, and is not where it denies it. What the model's own class shares is
    shared. Two parameters that are trained, drawn and equal in every entry were one.
    """
    model = step.model
    shared = _sharing(model)
    with_class = _class_shares(step)
    for names in with_class or []:
        first, *rest = names
        lost = next((n for n in rest if n in shared and shared[n] != shared.get(first)), None)
        if lost is not None:
            yield fail(
                lost, f"its class shares it with {first}, and here they are two", "tie them after all else"
            )
            return
    yield from _declared(step)
    yield from _copies(step)


def _sharing(model: nn.Module) -> dict[str, int]:
    named = model.named_parameters(remove_duplicate=False)
    return {n: p.data_ptr() if p.device.type != "meta" and p.numel() else id(p) for n, p in named}


def _class_shares(step: Step) -> list[list[str]] | None:
    if not drawn_by_class(step):
        return None
    groups: dict[int, list[str]] = defaultdict(list)
    for name, key in _sharing(fresh(step, 101)).items():
        groups[key].append(name)
    return [names for names in groups.values() if len(names) > 1]


def _declared(step: Step) -> Answers:
    facts = step.facts
    configured = facts.configured("tie_word_embeddings")
    wanted = facts.declared.tied if facts.declared.tied is not None else configured
    tables = {id(f.argument(1, "weight")): f.argument(1, "weight") for f in facts.lookups}
    heads = [n for n, role in facts.roles.items() if role == "head"]
    named = dict(facts.trace.model.named_parameters())
    pairs = [(n, t) for n in heads for t in tables.values() if named[n].shape == t.shape]
    if wanted is True and pairs and _class_shares(step) is None:
        place = pairs[0][0].rpartition(".")[0]
        yield fail(
            place, "embedding and head are declared tied, and are two tensors", "tie them after all else"
        )
    if (
        facts.declared.tied is False
        and not heads
        and any(t.shape[0] == facts.logits.shape[-1] for t in tables.values())
    ):
        yield fail(
            "", "embedding and head are declared separate, and are one tensor", "give the head its own matrix"
        )


def _copies(step: Step) -> Answers:
    inside = {f"{b.path}." for b in step.facts.blocks}
    seen: dict[Any, tuple[str, Tensor]] = {}
    for name, p in step.model.named_parameters():
        if not _drawn(p) or any(name.startswith(start) for start in inside):
            continue
        key = (p.shape, float(p.detach().double().sum()))
        if key in seen and torch.equal(seen[key][1], p) and p.requires_grad and seen[key][1].requires_grad:
            say = f"{name} equals {seen[key][0]} in every entry, and is another tensor"
            yield fail(name.rpartition(".")[0], say, "tie them again after copying, loading or moving")
            return
        seen.setdefault(key, (name, p))


def _drawn(p: Tensor) -> bool:
    """Whether a parameter is a matrix whose rows differ."""
    return p.ndim >= 2 and p.is_floating_point() and p.numel() > 1 and not torch.equal(p[0], p[-1])
