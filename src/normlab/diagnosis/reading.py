"""Read the residual stream of a model, sublayer by sublayer, from the numbers of one forward pass.

A check finds the stream in another way (``normlab.trace.facts.stacks``), because it asks another question:
whether whole blocks pass a stream on, and alike. It follows the graph of a pass, and makes the stream a
million times as large; what a block does inside is open. A diagnosis asks what each branch in a block adds,
by which factor, and where its norm is. The graph says what led to what, but not where one branch ends and the
next begins. So the sums are looked for among the values that enter and leave modules. Where they are not
seen, as where a branch is no module, a model cannot be read here, and can be checked all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

from torch import Tensor, nn

from normlab.base.io import validated
from normlab.diagnosis.block import BlockReader, StreamStep
from normlab.diagnosis.containers import candidates
from normlab.diagnosis.norms import Norms
from normlab.diagnosis.recording import ModuleEvent, Recording, awake, record
from normlab.diagnosis.structure import OTHER, PLACEMENTS, StackView, Structure, SublayerView
from normlab.diagnosis.sums import Factor, Sum, refit
from normlab.errors import UserError
from normlab.setups.setup import Setup
from normlab.trace.facts.stacks import within
from normlab.trace.restore import restored
from normlab.trace.tensors import Call, Tap, call_model, counts, unregistered, unwrap

OLDER: Final = "an older state of the stream"
PARALLEL: Final = "the parallel branch"
UNSURE: Final = "another branch (parallel, or one after the other through norms that no module computes)"
"""What may be beside a branch; ``UNSURE`` where nothing shows what the later of two branches reads."""

ReadBlock: TypeAlias = tuple[BlockReader, list[StreamStep]]
"""A block with the steps of the stream through it."""


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
        read, failed = reader.follow(blocks)
        if read and not failed:
            gap = reader.gap(read)
            if gap:
                unread[name] = gap
            else:
                stacks[name] = reader.stack(name, read)
        elif blocks and not _inside(name, unread):
            first_unread = failed[0] if failed else blocks[0]
            unread[name] = reader.refusal(name, blocks, first_unread)
    if not stacks:
        raise UserError(_nothing_read(reader.model, reader.recording, list(unread.values())))
    missed = list[str]()
    for name, why in unread.items():
        # a container may hold stages, say, whose blocks are the layers: then its stream was read in these
        holds_a_stack = any(_inside(stack, [name]) for stack in stacks)
        if not holds_a_stack:
            missed.append(why)
    return Structure(tuple(stacks.values()), tuple(missed))


def _inside(path: str, containers: Iterable[str]) -> bool:
    return any(not name or within(path, name) for name in containers)


class _StreamReader:
    """Turns the events of a recording into views."""

    def __init__(
        self,
        model: nn.Module,
        record_with: Callable[[Mapping[str, Tensor]], Recording],
        branches: Sequence[str],
    ) -> None:
        self.model, self._norms = model, Norms(model)
        self._record_with, self._branches = record_with, branches
        self.recording = record_with(awake(model))

    @cached_property
    def _as_it_is(self) -> Recording:
        """A pass with the model's own weights, which only factors need."""
        return self._record_with({})

    # ------------------------------------------------------------------------------------------------ blocks

    def blocks(self, paths: Sequence[str]) -> list[BlockReader]:
        """Return the blocks that ran, in order; if a stack ran twice, those of the first time."""
        spans = list(_called(self.recording, paths)) or list(_parts(self.recording, paths))
        blocks: list[BlockReader] = []
        for path, start, stop in spans:
            block = BlockReader(self.recording, self._norms, path, start, stop)
            ran_before = any(path == earlier.path for earlier in blocks)
            # a block that takes what the last one put out goes on with its stream: ALBERT's one block runs
            # several times in a row. Any other begins the stack once more
            if ran_before and not _goes_on(blocks[-1], block):
                break
            blocks.append(block)
        return blocks

    def follow(self, blocks: Sequence[BlockReader]) -> tuple[list[ReadBlock], list[BlockReader]]:
        """Return the blocks in which the stream was followed, and those of the same type in which it was not;
        blocks of other types may be something else than layers.
        """
        read, unread = list[ReadBlock](), list[BlockReader]()
        for block in blocks:
            steps = self._steps(block)
            if steps:
                read.append((block, steps))
            else:
                unread.append(block)
        types = {self._type(block) for block, _ in read}
        return read, [block for block in unread if self._type(block) in types]

    def _steps(self, block: BlockReader) -> list[StreamStep]:
        """Return the sums of a block, or none if some term is the output of no module before its sum: if a
        model's numbers are extreme, equal tensors are no evidence.
        """
        steps = block.named_steps(self._branches) if self._branches else block.steps()
        for step in steps:
            if not all(block.outputs_of(step, branch) for branch in block.branches(step)):
                return []
        return steps

    def _type(self, block: BlockReader) -> type[nn.Module]:
        return type(self._norms.modules[block.path])

    def gap(self, read: Sequence[ReadBlock]) -> str:
        """Say in which block something that no module outputs changes the stream; empty if none."""
        for block, steps in read:
            if not all(block.branches(step) for step in steps):
                return f"in {block.path} the stream is changed by what no module puts out"
        return ""

    def refusal(self, name: str, blocks: Sequence[BlockReader], block: BlockReader) -> str:
        """Say why a container was not read, from the first of its blocks that was not."""
        types = Counter(self._type(b).__name__ for b in blocks)
        counted = ", ".join(f"{count} x {kind}" for kind, count in types.items())
        why = "no tensors lead from its input to its output, each the one before plus what a module puts out"
        if self._branches:
            why = f"none of {', '.join(self._branches)} put out a tensor of its input's size"
        return f"{name or 'the model itself'} ({counted}) was not read: in {block.path} {why}"

    # ------------------------------------------------------------------------------------------------- views

    def stack(self, name: str, read: Sequence[ReadBlock]) -> StackView:
        views, sizes = list[SublayerView](), list[int]()
        for block, steps in read:
            in_block = [self._view(block, steps, step, y) for step in steps for y in block.branches(step)]
            views += in_block
            sizes.append(len(in_block))
        layers = _layers(sizes, [view.role for view in views])
        numbered = [
            replace(view, index=index, layer=layer)
            for index, (view, layer) in enumerate(zip(views, layers, strict=True))
        ]
        return StackView(name, tuple(numbered), self._final_norm(name, *read[-1]))

    def _final_norm(self, name: str, last: BlockReader, steps: Sequence[StreamStep]) -> str | None:
        """Return the path of the norm outside a container that takes the stream after its last block."""
        for call in self._norms.calls(self.recording, last.start, len(self.recording.events)):
            if call.given == steps[-1].after and not call.path.startswith(f"{name}."):
                return call.path
        return None

    def _view(
        self, block: BlockReader, steps: Sequence[StreamStep], step: StreamStep, y: int
    ) -> SublayerView:
        """Return the view of a branch; its place in the stack is not known yet."""
        outputs = {branch: block.outputs_of(step, branch) for branch in block.branches(step)}
        output = outputs[y][0]
        read = block.norm_at_start(step, outputs[y])
        before = block.events[0].tap(step.stream) if step is steps[0] else block.tap(step.stream)
        total = block.tap(step.sum.total)
        factors = self._with_own_factors(step.sum, before, output.tap(y), total)
        view = SublayerView(
            index=0,
            layer=0,
            role=block.role(step, outputs[y]),
            before=before,
            branch=output.tap(y),
            total=total,
            after=block.tap(step.after),
            norm_read=read.path if read else None,
            norm_branch=block.norm_at_end(y),
            norm_write=step.write,
            shortcut=factors.shortcut,
            scale=factors.scale,
            beside=_beside(block, step, outputs, y),
            placement=OTHER,
            relation="as named by the caller, not verified",
            modules=block.modules_run(step, output.path if len(outputs) > 1 else ""),
        )
        if not step.verified:
            return view
        factor = read.factor if read else 1.0
        relation = _relation(view, factor=factor, beside=_describe_beside(block, step, outputs))
        if block.second_streams(steps):
            return replace(view, relation=f"{relation}, and a second stream leaves the block")
        return replace(view, relation=relation, placement=_placement(view, factor))

    def _with_own_factors(self, fitted: Sum, before: Tap, branch: Tap, total: Tap) -> Sum:
        """Return a sum with the factors of the model's own weights. Plain sums have none, unless a count of
        steps sets them: the first pass has those of a late step.
        """
        if fitted.is_plain and not counts(self.model):
            return fitted
        recording = self._as_it_is
        return refit(
            fitted, stream=recording.at(before), branch=recording.at(branch), total=recording.at(total)
        )


def _beside(
    block: BlockReader, step: StreamStep, outputs: Mapping[int, Sequence[ModuleEvent]], y: int
) -> tuple[Tap, ...]:
    """Return the taps of what a sum adds besides the branch y: where other branches come out, else where a
    tensor is seen.
    """
    others = [number for number in step.sum.terms if number != y]
    return tuple(outputs[n][0].tap(n) if n in outputs else block.tap(n) for n in others)


def _describe_beside(
    block: BlockReader, step: StreamStep, outputs: Mapping[int, Sequence[ModuleEvent]]
) -> str:
    """Say what a sum of three adds besides a branch."""
    if len(step.sum.terms) == 1 or not set(step.sum.terms) <= outputs.keys():
        return OLDER
    return PARALLEL if block.side_by_side(step) else UNSURE


def _goes_on(before: BlockReader, block: BlockReader) -> bool:
    """Return whether a block is given a tensor that the one before it put out."""
    put_out = set(before.events[-1].seen.values())
    return bool(put_out & set(block.events[0].seen.values()))


def _called(recording: Recording, paths: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield path, first event and end of every call of these modules."""
    entered: dict[tuple[str, int], int] = {}
    for i, event in enumerate(recording.events):
        if event.path not in paths:
            continue
        if event.side == "input":
            entered[event.path, event.call] = i
        else:
            yield event.path, entered[event.path, event.call], i + 1


def _parts(recording: Recording, paths: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Do the same for blocks that are not called themselves, each until a part of the next is called."""
    spans: dict[str, list[int]] = {}
    for i, event in enumerate(recording.events):
        for path in paths:
            if event.path.startswith(f"{path}."):
                spans.setdefault(path, []).append(i)
    next_starts = [indices[0] for indices in spans.values()][1:]
    for number, (path, indices) in enumerate(spans.items()):
        after_last = next_starts[number] if number < len(next_starts) else indices[-1] + 1
        # with the event after the last, in which a sum may first be seen
        yield path, indices[0], after_last + 1


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
        return OTHER
    norms = view.norm_read is not None, view.norm_branch is not None, view.norm_write is not None
    for kind, placement in PLACEMENTS.items():
        if norms == (placement.norm_read, placement.norm_branch, placement.norm_write):
            return kind
    return OTHER


def _layers(sizes: Sequence[int], roles: Sequence[str]) -> list[int]:
    """Return the layer of each sublayer: the number of its block or, if no block has more than one sublayer,
    a number that grows when a role comes again.
    """
    if max(sizes) > 1:
        return [block for block, size in enumerate(sizes) for _ in range(size)]
    layers, layer, in_layer = list[int](), 0, set[str]()
    for role in roles:
        if role in in_layer:
            layer, in_layer = layer + 1, set()
        in_layer.add(role)
        layers.append(layer)
    return layers


def _nothing_read(model: nn.Module, recording: Recording, unread: Sequence[str]) -> str:
    """Say why no stream was found in a model, and what to pass."""
    name = type(model).__name__
    module = recording.broken()
    if module is not None:
        return (
            f"{name} computes what is not a number: {module or 'the model itself'} is the first module to "
            "put it out; check its weights and the batch"
        )
    reasons = [pointed_out(path, modules) for path, modules in unregistered(model).items()]
    lists = [path for path, module in model.named_modules() if _is_list_of_matrices(module)]
    if lists:
        reasons.append(
            f"the matrices in {', '.join(lists[:3])} belong to no module of a layer, and what a layer puts "
            "out is seen only where it is a module"
        )
    reasons += unread
    why = "; ".join(reasons[:3]) or "no numbered siblings with modules inside ran"
    return (
        f"no residual stream was found in {name}: {why}. Name the container of the blocks, or the blocks "
        'by globs, as in blocks="encoder.layer" or blocks="stage*"; where sums are not seen between modules, '
        'name the modules whose outputs are added, as in branches=("attn", "mlp"); sums with factors are '
        "seen in float32 only, as model.float() has it"
    )


def _is_list_of_matrices(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return False
    return sum(p.ndim > 1 for p in module.parameters(recurse=False)) > 1


def pointed_out(path: str, modules: list[nn.Module]) -> str:
    """Say that the modules of an attribute are not trained, and what to change."""
    types = Counter(type(module).__name__ for module in modules)
    counted = ", ".join(f"{count} x {kind}" for kind, count in types.items())
    parameters = {p for module in modules for p in module.parameters()}
    numbers = sum(p.numel() for p in parameters)
    return (
        f"{path} holds {counted} in a plain list or dict: their {numbers:,} parameters are not among the "
        "model's, so no optimizer trains them and no state_dict saves them; make it an nn.ModuleList or "
        "an nn.ModuleDict"
    )
