"""Properties of what must be built alike or shared: blocks with their siblings, and tied parameters."""

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


@property_of("structure", explains=LATER, passes=1, uses=AT_REST)
def siblings(step: StepUnderTest) -> Answers:
    """Blocks that look alike have the same types, settings and mode.

    Blocks look alike if they hold parameters of the same names and shapes. A plain attribute that differs in
    just one block is a slip if a newly made model has another value there, or if it belongs to a norm or a
    dropout; otherwise, and in the first or the last block, it may be intended.
    """
    yield from _modes(step)
    for blocks in step.facts.stacks.values():
        ran = [b for b in blocks if b.path in step.facts.order]
        types = {b.path: {p.dtype for p in step.model.get_submodule(b.path).parameters()} for b in ran}
        odd = stacks.odd_one({p: ", ".join(sorted(str(t)[6:] for t in own)) for p, own in types.items()})
        if odd is not None:
            yield fail(odd.key, f"its parameters are {odd.value}, others {odd.rest}", "keep all in one type")
        groups: dict[Any, list[stacks.Block]] = defaultdict(list)
        for b in ran:
            groups[tuple((n, p.shape) for n, p in b.module.named_parameters())].append(b)
        for same in groups.values():
            yield from _alike(step, same)


def _alike(step: StepUnderTest, blocks: Sequence[stacks.Block]) -> Answers:
    table: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for b in blocks:
        for inner, module in step.model.get_submodule(b.path).named_modules():
            for name, value in stacks.settings(module).items():
                table[inner, name][b.path] = value
    for (inner, name), values in table.items():
        odd = stacks.odd_one(values) if len(values) == len(blocks) else None
        place = f"{odd.key}.{inner}".rstrip(".") if odd else ""
        made = odd and step.fresh.has_setting(place, name, odd.value)
        if odd is None or (made and step.fresh.by_class):
            continue
        say = f"its {name} is {odd.value}, in the {len(values) - 1} other blocks {odd.rest}"
        number = odd.value != 0 and isinstance(odd.value, float) and isinstance(odd.rest, float)
        inside = len(values) > 3 and odd.key not in (blocks[0].path, blocks[-1].path)
        slip = (number or inside) and (made is False or sets_norm_or_dropout(step.unchanged, inner, values))
        yield fail(place, say, "build all blocks alike") if slip else note(place, say)


def _modes(step: StepUnderTest) -> Answers:
    """A module that draws in training is in evaluation mode, in a model that is not."""
    resting = [n for n, m in step.model.named_modules() if not m.training and stacks.learns(step.model, n)]
    if not step.model.training or not resting:
        return
    names = ("dropout", "batch_norm", "scaled_dot_product_attention")
    drawing = {c.module for c in step.unchanged.again(training=True).functions(*names) if c.draws}
    if odd := [n for n in resting if any(stacks.within(d, n) for d in drawing)]:
        say = f"{len(odd)} modules are in evaluation mode in a model in training mode"
        yield fail(stacks.common(odd), say, "call model.train() once it is built")


@property_of("structure", explains=["start", "seeds", "initial_loss", "state_dict"], passes=1, uses=AT_REST)
def ties(step: StepUnderTest) -> Answers:
    """Parameters are shared as declared or configured, and the head is no copy of the embedding table.

    The head's matrix is the embedding's table if ``tied`` (declared, or ``tie_word_embeddings``) is true, and
    is not if it is false. What the model's own class shares must be shared, and blocks of which it shares
    nothing own all that they hold. If head and table are drawn, trained and equal in every entry, they were
    tied once, unless ``tied`` is False; other copies are noted, and so are blocks that share a part and own
    the rest.
    """
    model, of_class, roles, blocks = step.model, step.fresh.of_class, step.facts.roles, step.facts.stacks
    first_names = {n: same[0] for same in shared_names(model) for n in same}
    for first, *rest in shared_names(of_class) if of_class is not None else ():
        lost = [n for n in rest if n in roles and first_names.get(first, first) != n]
        yield from (fail(n, f"its class shares it with {first}; here they are two", TIE) for n in lost)
    yield from _declared(step)
    yield from _shared_by_blocks(step)
    yield from _in_several_places(step)
    own = {n: p for n, p in model.named_parameters() if p.requires_grad and not stacks.block_of(blocks, n)}
    pairs = equal_draws(own, step.fresh.draws)
    copies = [({roles[a], roles[b]} != {"embedding", "head"}, a, b) for a, b in pairs]
    for meant, first, name in sorted(copies)[: step.declare.tied is not False]:
        place, say = name.rpartition(".")[0], f"{name} equals {first} in every entry, but is another tensor"
        yield note(place, say) if meant else fail(place, say, "tie them again after copying or loading them")


def _in_several_places(step: StepUnderTest) -> Answers:
    """One module with parameters that stands in several places of a list, as in one that is multiplied."""
    repeated: list[str] = []
    for path, module in step.model.named_modules():
        numbered = [(name, child) for name, child in children_of(module).items() if name.isdigit() and child]
        counts = Counter(id(child) for _, child in numbered)
        places = [name for name, child in numbered if counts[id(child)] > 1 and [*child.parameters()]]
        repeated += [f"{path}.{places[0]}".lstrip(".")] if places else []
    if repeated:
        say = f"this module stands in several places of its list ({count(len(repeated), 'such list')})"
        yield note(repeated[0], say)


def _shared_by_blocks(step: StepUnderTest) -> Answers:
    """Blocks that share a part and own the rest: one feed-forward was built once, and handed to all."""
    of_class = step.fresh.of_class
    meant = {name for same in shared_names(of_class) for name in same} if of_class is not None else set[str]()
    for blocks in step.facts.stacks.values():
        holders: dict[int, list[str]] = defaultdict(list)
        for block in {id(b.module): b for b in blocks}.values():  # one block may stand in several places
            for inner, p in block.module.named_parameters():
                holders[id(p)].append(f"{block.path}.{inner}")
        shared = [names for names in holders.values() if len(names) > 1]
        if not shared or len(shared) == len(holders):
            continue
        place = stacks.common([names[0] for names in shared])
        say = f"{len(shared[0])} blocks share {count(len(shared), 'parameter')} and own the others"
        if of_class is None:
            yield note(place, say)
        elif not meant.intersection(name for names in shared for name in names):
            yield fail(
                place, f"{say}; a model newly made by its class shares none", "build one for each block"
            )


def _declared(step: StepUnderTest) -> Answers:
    facts, tied = step.facts, step.declare.tied
    wanted = facts.configured("tie_word_embeddings") if tied is None else tied
    parameters = dict(facts.trace.model.named_parameters())
    tables = [f.argument(1, "weight").shape for f in facts.lookups]
    heads = [n for n, role in facts.roles.items() if role == "head"]
    apart = next((n for n in heads if parameters[n].shape in tables), None)
    # a class may have no such tie, whatever a default of its configuration says; what is declared is meant
    if wanted is True and apart is not None and (tied or step.fresh.of_class is None):
        yield fail(apart.rpartition(".")[0], "declared tied to the embedding, but a tensor of its own", TIE)
    if tied is False and not heads and any(shape[0] == facts.logits.shape[-1] for shape in tables):
        yield fail("", "embedding and head are declared separate, but are one tensor", "untie the head")
