"""Properties of what is built alike: settings of blocks, and parameters that are one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from normlab.checks.property import Answers, fail, note, property_of
from normlab.checks.step import Step
from normlab.trace.facts.stacks import Block, block_of, common, odd_one, within
from normlab.trace.functions import FunctionCall
from normlab.trace.starts import equal_draws


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
        types = {b.path: {p.dtype for p in step.model.get_submodule(b.path).parameters()} for b in ran}
        odd = odd_one({path: ", ".join(sorted(str(t)[6:] for t in own)) for path, own in types.items()})
        if odd is not None:
            say = f"its parameters are {odd.value}, those of the other blocks {odd.rest}"
            yield fail(odd.key, say, "keep all blocks in one type")
            return
        groups: dict[Any, list[Block]] = defaultdict(list)
        for b in ran:
            groups[tuple((n, p.shape) for n, p in b.module.named_parameters())].append(b)
        for alike in groups.values():
            yield from _settings(step, alike)


def _settings(step: Step, blocks: Sequence[Block]) -> Answers:
    table: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for b in blocks:
        for inner, module in step.model.get_submodule(b.path).named_modules():
            for name, value in _plain(module).items():
                table[inner, name][b.path] = value
    for (inner, name), values in table.items():
        odd = odd_one(values) if len(values) == len(blocks) else None
        place = f"{odd.key}.{inner}".rstrip(".") if odd else ""
        if odd is None or _built_so(step, place, name, odd.value):
            continue
        say = f"its {name} is {odd.value}, in the {len(values) - 1} other blocks {odd.rest}"
        number = isinstance(odd.rest, float) and isinstance(odd.value, float) and odd.value != 0
        at_an_end = odd.key in (blocks[0].path, blocks[-1].path)
        slip = number or (not at_an_end and len(values) > 3)
        yield fail(place, say, "build all blocks alike") if slip else note(place, say)


def _plain(module: nn.Module) -> dict[str, Any]:
    """The class, the plain attributes and the names of the functions of a module."""
    plain: dict[str, Any] = {"class": type(module).__name__}
    for name, value in vars(module).items():
        if (value is None or isinstance(value, (bool, int, float, str))) and name != "training":
            plain[name] = value
        elif callable(value) and hasattr(value, "__name__"):
            plain[name] = value.__name__
    return plain


def _built_so(step: Step, path: str, name: str, value: Any) -> bool:
    """Whether the model's own class gives it this setting."""
    model = step.fresh.of_class
    own = None if model is None else dict(model.named_modules()).get(path)
    return own is not None and _plain(own).get(name) == value


def _modes(step: Step) -> Answers:
    """A module that draws something in training stands in evaluation mode in a model that does not."""
    if not step.model.training:
        return
    resting = [n for n, m in step.model.named_modules() if not m.training and _learns(step.model, n)]
    if not resting:
        return
    names = ("dropout", "batch_norm", "scaled_dot_product_attention")
    drawing = {c.module for c in step.plain.again(training=True).functions(*names) if _draws(c)}
    odd = [n for n in resting if any(within(d, n) for d in drawing)]
    if odd:
        say = f"{len(odd)} modules are in evaluation mode in a model in training mode"
        yield fail(common(odd), say, "call model.train() once it is built")


def _learns(model: nn.Module, path: str) -> bool:
    """Whether the smallest part around a module that has parameters is trained."""
    held = list(model.get_submodule(path).parameters())
    return any(p.requires_grad for p in held) if held or not path else _learns(model, path.rpartition(".")[0])


def _draws(call: FunctionCall) -> bool:
    if call.name == "batch_norm":
        return bool(call.argument(5, "training", False))
    if call.name == "dropout":
        return bool(call.argument(1, "p", 0.5)) and bool(call.argument(2, "training", True))
    return bool(call.argument(4, "dropout_p", 0.0))


@property_of("structure", explains=["start", "seeds", "initial_loss", "state_dict"], passes=0)
def ties(step: Step) -> Answers:
    """Parameters are shared as declared or configured, and none is a copy of another one.

    The head's matrix is the table of the embedding where ``tied`` (declared, or the configuration's
    ``tie_word_embeddings``) says so, and is not where it denies it. What the model's own class shares is
    shared. Two parameters that are trained, drawn and equal in every entry were one.
    """
    own = {n: key for key, names in _shared(step.model).items() for n in names}
    of_class = step.fresh.of_class
    for first, *rest in _shared(of_class).values() if of_class is not None else ():
        lost = next((n for n in rest if n in own and own[n] != own.get(first)), None)
        if lost is not None:
            say = f"its class shares it with {first}, and here they are two"
            yield fail(lost, say, "tie them after all else")
            return
    yield from _declared(step)
    outside = {n: p for n, p in step.model.named_parameters() if not block_of(step.facts.stacks, n)}
    for first, name in equal_draws({n: p for n, p in outside.items() if p.requires_grad}):
        say = f"{name} equals {first} in every entry, and is another tensor"
        yield fail(name.rpartition(".")[0], say, "tie them again after copying, loading or moving")
        return


def _shared(model: nn.Module) -> Mapping[int, list[str]]:
    """The names of each parameter, by its storage."""
    names: dict[int, list[str]] = defaultdict(list)
    for n, p in model.named_parameters(remove_duplicate=False):
        names[p.data_ptr() if p.device.type != "meta" and p.numel() else id(p)].append(n)
    return names


def _declared(step: Step) -> Answers:
    facts, tied = step.facts, step.declare.tied
    wanted = facts.configured("tie_word_embeddings") if tied is None else tied
    parameters = dict(facts.trace.model.named_parameters())
    tables = [f.argument(1, "weight").shape for f in facts.lookups]
    heads = [n for n, role in facts.roles.items() if role == "head"]
    apart = next((n for n in heads if parameters[n].shape in tables), None)
    if wanted is True and apart is not None and step.fresh.of_class is None:
        say = "embedding and head are declared tied, and are two tensors"
        yield fail(apart.rpartition(".")[0], say, "tie them after all else")
    if tied is False and not heads and any(shape[0] == facts.logits.shape[-1] for shape in tables):
        say = "embedding and head are declared separate, and are one tensor"
        yield fail("", say, "give the head its own matrix")
