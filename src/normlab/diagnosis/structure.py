"""Read the residual stream of a model from the numbers of one forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

from torch import Tensor, nn

from normlab.base.io import validated
from normlab.diagnosis.block import BlockReader, Norms, StreamStep, candidates
from normlab.diagnosis.recording import Factor, Recording, Sum, awake, record, refit
from normlab.errors import UserError
from normlab.setups.setup import Setup
from normlab.trace.facts.stacks import within
from normlab.trace.restore import restored
from normlab.trace.tensors import Call, Tap, call_model, counts, unregistered, unwrap

PLACEMENTS: Final = {
    (False, False, True): "post",
    (True, False, False): "pre",
    (True, True, False): "sandwich",
}
"""Placements by whether a norm is where the branch reads the stream, at the branch's end, and on the sum."""
UNSURE: Final = "another branch (parallel, or one after the other through norms that no module computes)"
"""What is beside a branch if it is not seen what the later of the two reads."""


@dataclass(frozen=True)
class SublayerView:
    r"""A branch and its two places in the stream, :math:`t = a \odot s + c \odot y`: s is ``before``, y
    ``branch``, t ``total``; ``after`` is t, or the norm of t.

    ``role`` is ``self_attention``, ``cross_attention``, ``ffn`` or ``branch``; ``index`` counts sublayers and
    ``layer`` layers of the stack. ``norm_read`` is the path of the norm through which the branch reads s,
    ``norm_branch`` of the one that outputs y, ``norm_write`` of the one on t. ``beside`` is what t also
    adds: the other branch of a parallel layer, or an older state of the stream. In training, y is what is
    added if the dropout on it is a module, and what goes into the dropout if it is a function.
    """

    index: int
    layer: int
    role: str
    before: Tap
    branch: Tap
    total: Tap
    after: Tap
    norm_read: str | None
    norm_branch: str | None
    norm_write: str | None
    shortcut: Factor
    """a: one number, or one per channel."""
    scale: Factor
    """c."""
    beside: tuple[Tap, ...]
    placement: str
    """``post``: after = norm(before + branch); ``pre``: before + branch, where the branch reads norm(before);
    ``sandwich``: a ``pre`` whose branch ends in a norm; ``other``."""
    relation: str
    """The equation that these tensors satisfy, in words."""
    modules: tuple[str, ...] = ()
    """Paths of the modules that run in the sublayer, in order."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self.before, self.branch, self.total, self.after, *self.beside

    @property
    def norms(self) -> tuple[str, ...]:
        return tuple(path for path in (self.norm_read, self.norm_branch, self.norm_write) if path is not None)


@dataclass(frozen=True)
class StackView:
    """The sublayers in one container of blocks, in the order of the stream, and the norm after the last."""

    name: str
    sublayers: tuple[SublayerView, ...]
    final_norm: str | None


@dataclass(frozen=True)
class Structure:
    """The stacks of a model in order, and a sentence for each container of blocks without a stream."""

    stacks: tuple[StackView, ...]
    unread: tuple[str, ...]

    @property
    def sublayers(self) -> list[tuple[str, SublayerView]]:
        return [(stack.name, view) for stack in self.stacks for view in stack.sublayers]

    def __str__(self) -> str:
        lines: list[str] = []
        for stack in self.stacks:
            layers = stack.sublayers[-1].layer + 1
            lines.append(f"{stack.name}: {layers} layers, {len(stack.sublayers)} sublayers")
            kinds = [(view.role, view.placement, view.relation) for view in stack.sublayers]
            for kind in dict.fromkeys(kinds):
                lines.append(f"  {kinds.count(kind)} x {kind[0]}: {kind[1]}, {kind[2]}")
        return "\n".join([*lines, *self.unread])


@validated
def read_structure(
    model: nn.Module,
    batch: Any,
    *,
    call: Call | None = None,
    blocks: str | Sequence[str] = (),
    branches: Sequence[str] = (),
) -> Structure:
    """Find every stack of residual blocks in any model.

    The model runs in evaluation mode on ``call(model, batch)``; what enters and leaves its modules is
    recorded, and in every block the stream is followed from sum to sum: an observed tensor that is the stream
    plus a module's output, to the last bits, scaled by one number or one per channel if necessary.
    Names only label roles. For this pass, other values replace parameters that are zero, because a branch
    that adds nothing is not seen; factors are fitted in a second pass, on the model's own weights.

    ``blocks`` names the container of the blocks, or the blocks themselves by globs, if numbered siblings are
    not enough; ``branches`` names, by their paths in a block, the modules whose outputs are added, if the
    sums cannot be seen. Raises UserError, saying what to pass, for a model that raises or cannot be read.

    >>> structure = normlab.read_structure(model, batch)
    >>> [(stack.name, len(stack.sublayers)) for stack in structure.stacks]
    [('decoder.sublayers', 4)]
    """
    model, globs = unwrap(model), [blocks] if isinstance(blocks, str) else blocks
    with restored(Setup(model, batch, call)):
        return _read(_StreamReader(model, partial(record, model, batch, call or call_model), branches), globs)


def _read(reader: _StreamReader, globs: Sequence[str]) -> Structure:
    stacks, unread = dict[str, StackView](), dict[str, str]()
    for name, children in candidates(reader.model, globs):
        if _inside(name, stacks):
            continue
        blocks = reader.blocks(children)
        read = [(block, steps) for block in blocks if (steps := reader.steps(block))]
        kinds = {reader.kind(block) for block, _ in read}
        failed = [b for b in blocks if b not in [block for block, _ in read] and reader.kind(b) in kinds]
        if read and not failed and (gap := reader.gap(read)):
            unread[name] = gap
        elif read and not failed:
            stacks[name] = reader.stack(name, read)
        elif blocks and not _inside(name, unread):
            unread[name] = reader.sentence(name, blocks, (failed or blocks)[0])
    if not stacks:
        raise UserError(_sorry(reader.model, reader.recording, list(unread.values())))
    missed = [why for name, why in unread.items() if not any(_inside(stack, [name]) for stack in stacks)]
    return Structure(tuple(stacks.values()), tuple(missed))


def _inside(path: str, containers: Iterable[str]) -> bool:
    return any(not name or within(path, name) for name in containers)


class _StreamReader:
    """Turns the events of a recording into views."""

    def __init__(
        self, model: nn.Module, pass_on: Callable[[Mapping[str, Tensor]], Recording], branches: Sequence[str]
    ) -> None:
        self.model, self._norms = model, Norms(model)
        self._branches, self._pass_on = branches, pass_on
        self.recording = pass_on(awake(model))

    @cached_property
    def _own(self) -> Recording:
        """A pass with the model's own weights, which only factors need."""
        return self._pass_on({})

    def kind(self, block: BlockReader) -> type[nn.Module]:
        return type(self._norms.modules[block.path])

    def steps(self, block: BlockReader) -> list[StreamStep]:
        """Return the sums of a block, or none if some term is the output of no module before its sum: if a
        model's numbers are extreme, equal tensors are no evidence.
        """
        steps = block.named_steps(self._branches) if self._branches else block.steps()
        shown = all(block.put_out(step, y) for step in steps for y in block.branches(step))
        return steps if shown else []

    def blocks(self, paths: Sequence[str]) -> list[BlockReader]:
        """Return the blocks that ran, in order; if a stack ran twice, those of the first time."""
        spans = list(_called(self.recording, paths)) or list(_parts(self.recording, paths))
        blocks: list[BlockReader] = []
        for path, start, stop in spans:
            block = BlockReader(self.recording, self._norms, path, start, stop)
            entered = set(block.events[0].seen.values())
            again = any(path == earlier.path for earlier in blocks)
            if again and not entered & set(blocks[-1].events[-1].seen.values()):
                break
            blocks.append(block)
        return blocks

    def gap(self, read: Sequence[tuple[BlockReader, list[StreamStep]]]) -> str:
        """Say in which block something that no module outputs changes the stream; empty if none."""
        paths = [block.path for block, steps in read if not all(block.branches(step) for step in steps)]
        return f"in {paths[0]} the stream is changed by what no module puts out" if paths else ""

    def stack(self, name: str, read: Sequence[tuple[BlockReader, list[StreamStep]]]) -> StackView:
        views = [self._view(b, steps, s, y) for b, steps in read for s in steps for y in b.branches(s)]
        sizes = [sum(len(block.branches(step)) for step in steps) for block, steps in read]
        layers = _layers(sizes, [view.role for view in views])
        numbered = [replace(v, index=i, layer=n) for i, (v, n) in enumerate(zip(views, layers, strict=True))]
        (last, steps), events = read[-1], len(self.recording.events)
        calls = self._norms.calls(self.recording, last.start, events)
        final = [n.path for n in calls if n.given == steps[-1].after and not n.path.startswith(f"{name}.")]
        return StackView(name, tuple(numbered), next(iter(final), None))

    def _view(
        self, block: BlockReader, steps: Sequence[StreamStep], step: StreamStep, y: int
    ) -> SublayerView:
        shown = {n: block.put_out(step, n) for n in block.branches(step)}
        branch, read = shown[y][0], block.read(step, shown[y])
        before = block.events[0].tap(step.stream) if step is steps[0] else block.tap(step.stream)
        total, others = block.tap(step.sum.total), [n for n in step.sum.terms if n != y]
        own_sum = self._with_own_factors(step.sum, before, branch.tap(y), total)
        view = SublayerView(
            index=0,
            layer=0,
            role=block.role(step, shown[y]),
            before=before,
            branch=branch.tap(y),
            total=total,
            after=block.tap(step.after),
            norm_read=read.path if read else None,
            norm_branch=block.normed(y),
            norm_write=step.write,
            shortcut=own_sum.shortcut,
            scale=own_sum.scale,
            beside=tuple(shown[n][0].tap(n) if n in shown else block.tap(n) for n in others),
            placement="other",
            relation="as named by the caller, not verified",
            modules=block.ran(step, branch.path if len(shown) > 1 else ""),
        )
        if not step.verified:
            return view
        factor = read.factor if read else 1.0
        beside = "an older state of the stream"
        if others and set(others) <= set(shown):
            beside = "the parallel branch" if block.side_by_side(step) else UNSURE
        relation = _relation(view, factor=factor, beside=beside)
        if block.second_streams(steps):
            return replace(view, relation=f"{relation}, and a second stream leaves the block")
        return replace(view, relation=relation, placement=_placement(view, factor))

    def _with_own_factors(self, one: Sum, before: Tap, branch: Tap, total: Tap) -> Sum:
        if (one.shortcut, one.scale) == (1.0, 1.0) and not counts(self.model):
            return one  # a count of steps sets factors, and the first pass has those of a late step
        own = self._own
        return refit(one, stream=own.at(before), branch=own.at(branch), total=own.at(total))

    def sentence(self, name: str, blocks: Sequence[BlockReader], block: BlockReader) -> str:
        """Say why a container was not read, from the first of its blocks that was not."""
        kinds = [self.kind(b).__name__ for b in blocks]
        count = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        why = "no tensors lead from its input to its output, each the one before plus what a module puts out"
        if self._branches:
            why = f"none of {', '.join(self._branches)} put out a tensor of its input's size"
        return f"{name or 'the model itself'} ({count}) was not read: in {block.path} {why}"


def _called(recording: Recording, paths: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    entered: dict[tuple[str, int], int] = {}
    for i, event in enumerate(recording.events):
        if event.path in paths and event.side == "input":
            entered[event.path, event.call] = i
        elif event.path in paths:
            yield event.path, entered[event.path, event.call], i + 1


def _parts(recording: Recording, paths: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Do the same for blocks that are not called themselves, each until a part of the next is called."""
    spans: dict[str, list[int]] = {}
    for i, event in enumerate(recording.events):
        for path in paths:
            if event.path.startswith(f"{path}."):
                spans.setdefault(path, []).append(i)
    starts = [indices[0] for indices in spans.values()]
    for (path, indices), stop in zip(spans.items(), [*starts[1:], None], strict=False):
        yield path, indices[0], (indices[-1] + 1 if stop is None else stop) + 1


def _relation(view: SublayerView, *, factor: float, beside: str) -> str:
    more = f" + {beside}" if view.beside else ""
    total = f"{_times(view.shortcut)}before + {_times(view.scale)}branch{more}"
    parts = [f"after = norm({total})" if view.norm_write else f"after = {total}"]
    if view.norm_read:
        parts.append(f"branch reads {_times(factor)}norm(before)")
    if view.norm_branch:
        parts.append("branch is normed")
    return ", ".join(parts)


def _times(factor: Factor) -> str:
    if isinstance(factor, tuple):
        return f"(one a channel, mean {sum(factor) / len(factor):.3g}) "
    return "" if factor == 1.0 else f"{factor:.3g} "


def _placement(view: SublayerView, factor: float) -> str:
    if (view.shortcut, view.scale, factor) != (1.0, 1.0, 1.0) or view.beside:
        return "other"
    norms = view.norm_read is not None, view.norm_branch is not None, view.norm_write is not None
    return PLACEMENTS.get(norms, "other")


def _layers(sizes: Sequence[int], roles: Sequence[str]) -> list[int]:
    """Return layers: a sublayer's block or, if blocks have one, a number that grows when roles repeat."""
    if max(sizes) > 1:
        return [i for i, size in enumerate(sizes) for _ in range(size)]
    layers, seen = list[int](), set[str]()
    for role in roles:
        if role in seen:
            seen = set()
        layers.append((layers[-1] + (not seen)) if layers else 0)
        seen.add(role)
    return layers


def _of_matrices(module: nn.Module) -> bool:
    lists = nn.ParameterList, nn.ParameterDict
    return isinstance(module, lists) and sum(p.ndim > 1 for p in module.parameters(recurse=False)) > 1


def _sorry(model: nn.Module, recording: Recording, unread: Sequence[str]) -> str:
    name = type(model).__name__
    if (module := recording.broken()) is not None:
        return (
            f"{name} computes what is not a number: {module or 'the model itself'} is the first module to "
            "put it out; check its weights and the batch"
        )
    hidden = [pointed_out(path, modules) for path, modules in unregistered(model).items()]
    lists = [path for path, module in model.named_modules() if _of_matrices(module)]
    if lists:
        hidden.append(
            f"the matrices in {', '.join(lists[:3])} belong to no module of a layer, and what a layer puts "
            "out is seen only where it is a module"
        )
    seen = "; ".join([*hidden, *unread][:3]) or "no numbered siblings with modules inside ran"
    return (
        f"no residual stream was found in {name}: {seen}. Name the container of the blocks, or the blocks "
        'by globs, as in blocks="encoder.layer" or blocks="stage*"; where sums are not seen between modules, '
        'name the modules whose outputs are added, as in branches=("attn", "mlp"); sums with factors are '
        "seen in float32 only, as model.float() has it"
    )


def pointed_out(path: str, modules: list[nn.Module]) -> str:
    """Say that the modules of an attribute are not trained, and what to change."""
    kinds = Counter(type(module).__name__ for module in modules)
    counted = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    parameters = sum(p.numel() for p in {p for module in modules for p in module.parameters()})
    return (
        f"{path} holds {counted} in a plain list or dict: their {parameters:,} parameters are not among the "
        "model's, so no optimizer trains them and no state_dict saves them; make it an nn.ModuleList or "
        "an nn.ModuleDict"
    )
