"""Test what must be built alike or shared: blocks with their siblings, and tied parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from normlab.base.units import count
from normlab.checks.property import AT_REST, Answers, fail, note, property_of
from normlab.private_torch import children_of
from normlab.trace.facts import stacks
from normlab.trace.facts.stacks import sets_norm_or_dropout
from normlab.trace.starts import equal_draws
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import shared_names

TIE = "tie them after all else"
LATER = ("precision", "training_equals_evaluation", "evaluation_repeats")
DRAWING = ("dropout", "batch_norm", "scaled_dot_product_attention")
"""Functions of torch that know of the mode."""


@property_of("structure", explains=LATER, passes=1, uses=AT_REST)
def siblings(step: StepUnderTest) -> Answers:
    """Blocks that look alike have the same types, settings and mode.

    Blocks look alike if they hold parameters of the same names and shapes. A plain attribute that differs in
    just one block is a slip if a newly made model has another value there, or if it belongs to a norm or a
    dropout; otherwise, and in the first or the last block, it may be intended.
    """
    yield from _modes(step)
    for blocks in step.facts.stacks.values():
        ran = [block for block in blocks if block.path in step.facts.order]
        yield from _of_one_type(step, ran)
        alike: dict[Any, list[stacks.Block]] = defaultdict(list)
        for block in ran:
            shapes = tuple((name, p.shape) for name, p in block.module.named_parameters())
            alike[shapes].append(block)
        for group in alike.values():
            yield from _of_one_setting(step, group)


def _of_one_type(step: StepUnderTest, blocks: Sequence[stacks.Block]) -> Answers:
    """One block whose parameters have another type than those of all others."""
    types: dict[str, str] = {}
    for block in blocks:
        dtypes = {p.dtype for p in step.model.get_submodule(block.path).parameters()}
        types[block.path] = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    odd = stacks.odd_one(types)
    if odd is not None:
        yield fail(odd.key, f"its parameters are {odd.value}, others {odd.rest}", "keep all in one type")


def _of_one_setting(step: StepUnderTest, blocks: Sequence[stacks.Block]) -> Answers:
    """One block with another plain attribute, such as an eps, than all others of its kind."""
    # by the path within a block and the name of the attribute, then by block
    values_of: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for block in blocks:
        for inner, module in step.model.get_submodule(block.path).named_modules():
            for name, value in stacks.settings(module).items():
                values_of[inner, name][block.path] = value
    for (inner, name), values in values_of.items():
        odd = stacks.odd_one(values) if len(values) == len(blocks) else None
        if odd is None:
            continue
        place = f"{odd.key}.{inner}".rstrip(".")
        is_as_made = step.fresh.has_setting(place, name, odd.value)  # None: no new model can be made
        if is_as_made and step.fresh.by_class:
            continue
        evidence = f"its {name} is {odd.value}, in the {len(values) - 1} other blocks {odd.rest}"
        # another number is a slip of the pen; 0 may switch something off. Ends of a stack may be special.
        is_number = odd.value != 0 and isinstance(odd.value, float) and isinstance(odd.rest, float)
        is_inside = len(values) > 3 and odd.key not in (blocks[0].path, blocks[-1].path)
        is_unlike_made = is_as_made is False
        if (is_number or is_inside) and (
            is_unlike_made or sets_norm_or_dropout(step.unchanged, inner, values)
        ):
            yield fail(place, evidence, "build all blocks alike")
        else:
            yield note(place, evidence)


def _modes(step: StepUnderTest) -> Answers:
    """A module that draws in training is in evaluation mode, in a model that is not."""
    resting = [
        path
        for path, module in step.model.named_modules()
        if not module.training and stacks.learns(step.model, path)
    ]
    if not step.model.training or not resting:
        return
    calls = step.unchanged.again(training=True).functions(*DRAWING)
    drawing = {call.module for call in calls if call.draws}
    odd = [path for path in resting if any(stacks.within(module, path) for module in drawing)]
    if odd:
        evidence = f"{len(odd)} modules are in evaluation mode in a model in training mode"
        yield fail(stacks.common(odd), evidence, "call model.train() once it is built")


@property_of("structure", explains=["start", "seeds", "initial_loss", "state_dict"], passes=1, uses=AT_REST)
def ties(step: StepUnderTest) -> Answers:
    """Parameters are shared as declared or configured, and the head is no copy of the embedding table.

    The head's matrix is the embedding's table if ``tied`` (declared, or ``tie_word_embeddings``) is true, and
    is not if it is false. What the model's own class shares must be shared, and blocks of which it shares
    nothing own all that they hold. If head and table are drawn, trained and equal in every entry, they were
    tied once, unless ``tied`` is False; other copies are noted, and so are blocks that share a part and own
    the rest.
    """
    yield from _untied_from_class(step)
    yield from _tied_as_declared(step)
    yield from _shared_by_blocks(step)
    yield from _in_several_places(step)
    yield from _copies(step)


def _untied_from_class(step: StepUnderTest) -> Answers:
    """Parameters that the model's own class shares, and the model does not."""
    of_class, roles = step.fresh.of_class, step.facts.roles
    if of_class is None:
        return
    first_names = {name: names[0] for names in shared_names(step.model) for name in names}
    for first, *others in shared_names(of_class):
        for name in others:
            if name in roles and first_names.get(first, first) != name:
                yield fail(name, f"its class shares it with {first}; here they are two", TIE)


def _copies(step: StepUnderTest) -> Answers:
    """Drawn parameters that are equal in every entry: independent draws never are, so one is a copy."""
    roles, blocks = step.facts.roles, step.facts.stacks
    outside_blocks = {
        name: p
        for name, p in step.model.named_parameters()
        if p.requires_grad and not stacks.block_of(blocks, name)
    }
    copies: list[tuple[bool, str, str]] = []
    for first, name in equal_draws(outside_blocks, step.fresh.draws):
        may_be_meant = {roles[first], roles[name]} != {"embedding", "head"}
        copies.append((may_be_meant, first, name))
    if step.declare.tied is False or not copies:
        return
    for may_be_meant, first, name in sorted(copies)[:1]:  # a head that is no longer tied comes first
        place = name.rpartition(".")[0]
        evidence = f"{name} equals {first} in every entry, but is another tensor"
        if may_be_meant:
            yield note(place, evidence)
        else:
            yield fail(place, evidence, "tie them again after copying or loading them")


def _in_several_places(step: StepUnderTest) -> Answers:
    """One module with parameters that stands in several places of a list, as after ``[layer] * n``."""
    repeated: list[str] = []
    for path, module in step.model.named_modules():
        # the table of children and not named_children(), which yields each module once
        numbered = [(name, child) for name, child in children_of(module).items() if name.isdigit() and child]
        counts = Counter(id(child) for _, child in numbered)
        places = [name for name, child in numbered if counts[id(child)] > 1 and [*child.parameters()]]
        if places:
            repeated.append(f"{path}.{places[0]}".lstrip("."))
    if repeated:
        evidence = f"this module stands in several places of its list ({count(len(repeated), 'such list')})"
        yield note(repeated[0], evidence)


def _shared_by_blocks(step: StepUnderTest) -> Answers:
    """Blocks that share a part and own the rest: one feed-forward was built once, and handed to all."""
    of_class = step.fresh.of_class
    shared_by_class = set[str]()
    if of_class is not None:
        shared_by_class = {name for names in shared_names(of_class) for name in names}
    for blocks in step.facts.stacks.values():
        holders: dict[int, list[str]] = defaultdict(list)
        for block in {id(b.module): b for b in blocks}.values():  # one block may stand in several places
            for inner, p in block.module.named_parameters():
                holders[id(p)].append(f"{block.path}.{inner}")
        shared = [names for names in holders.values() if len(names) > 1]
        # blocks that share everything are one block, used several times
        if not shared or len(shared) == len(holders):
            continue
        place = stacks.common([names[0] for names in shared])
        evidence = f"{len(shared[0])} blocks share {count(len(shared), 'parameter')} and own the others"
        if of_class is None:
            yield note(place, evidence)
        elif not shared_by_class.intersection(name for names in shared for name in names):
            evidence += "; a model newly made by its class shares none"
            yield fail(place, evidence, "build one for each block")


def _tied_as_declared(step: StepUnderTest) -> Answers:
    """Head and embedding are one tensor, or two, as is declared or configured."""
    facts, declared = step.facts, step.declare.tied
    wanted = facts.configured("tie_word_embeddings") if declared is None else declared
    parameters = dict(facts.trace.model.named_parameters())
    tables = [call.argument(1, "weight").shape for call in facts.lookups]
    heads = [name for name, role in facts.roles.items() if role == "head"]
    untied = next((name for name in heads if parameters[name].shape in tables), None)
    # a class may have no such tie, whatever a default of its configuration says; what is declared is meant
    if wanted is True and untied is not None and (declared or step.fresh.of_class is None):
        yield fail(untied.rpartition(".")[0], "declared tied to the embedding, but a tensor of its own", TIE)
    if declared is False and not heads and any(shape[0] == facts.logits.shape[-1] for shape in tables):
        yield fail("", "embedding and head are declared separate, but are one tensor", "untie the head")
