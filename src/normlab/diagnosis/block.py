"""Follow the residual stream through a block, from sum to sum; find blocks and name branches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from operator import ne
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normlab.diagnosis.recording import ModuleEvent, Recording, Sum, Sums
from normlab.errors import UserError
from normlab.trace.copies import copied_model
from normlab.trace.facts.stacks import shared, within
from normlab.trace.tensors import Tap

ATTENTION = re.compile(r"att(n|ention)|mha", re.IGNORECASE)
FFN = re.compile(r"mlp|ff|feed_?forward|fc\d|intermediate|linear\d|dense|moe|expert|glu", re.IGNORECASE)


class _NormCall(NamedTuple):
    """A call of a norm, with the numbers of its input and its output tensor."""

    path: str
    given: int
    output: int


class _NormRead(NamedTuple):
    """The norm through which a branch reads the stream, and the factor on its output."""

    path: str
    factor: float


class StreamStep(NamedTuple):
    """A step of the stream from one tensor to the next: a sum and, in a Post-LN, the norm of the sum."""

    stream: int
    sum: Sum
    after: int
    write: str | None = None
    verified: bool = True


class Norms:
    """Recognises norms: modules whose output does not grow with their input and whose parameters are at most
    as large as a row. That includes modules that divide by a scale and modules that squash.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules = dict(model.named_modules())
        self.is_norm = cache(lambda path, dim: _is_norm(modules[path], dim))

    def calls(self, recording: Recording, start: int, stop: int) -> Iterator[_NormCall]:
        """Yield the calls of norms among these events, the innermost module first.

        A norm takes one tensor, and takes it once, unlike a sum of equal streams.
        """
        entered: dict[tuple[str, int], list[int]] = {}
        for event in recording.events[start:stop]:
            seen, of = list(event.seen.values()), (event.path, event.call)
            if event.side == "input":
                entered[of] = seen
            elif len(given := entered.get(of, [])) == len(seen) == 1 and given != seen:
                (x,), (y,) = given, seen
                size = recording.sizes[x]
                if size == recording.sizes[y] and self.is_norm(event.path, size[1]):
                    yield _NormCall(event.path, x, y)


@torch.no_grad()
def _is_norm(module: nn.Module, dim: int) -> bool:
    parameters = list(module.parameters())
    if any(p.numel() > dim for p in parameters):
        return False
    x = torch.randn(1, 8, dim, generator=torch.Generator().manual_seed(0))
    if parameters:
        x = x.to(parameters[0])
    if any(True for _ in module.buffers()):
        module = copied_model(module)  # a batch norm counts its batches
    try:
        small, large = module(x).norm(), module(1000 * x).norm()
    except Exception:  # it does not take a single tensor
        return False
    return bool(large <= 10 * small)


class BlockReader:
    """The events ``start`` to ``stop`` of a recording, which belong to the block at ``path``.

    A block that is itself called begins and ends with its own events. If its parts are called from outside,
    it ends with the event after its last one, because a sum may first be seen there.
    """

    def __init__(self, recording: Recording, norms: Norms, path: str, start: int, stop: int) -> None:
        self.recording, self.path, self.start, self.stop = recording, path, start, stop
        self.events = recording.events[start:stop]
        self._modules = norms.modules
        self.called = self.events[0].path == path
        calls = norms.calls(recording, start, stop)  # one that blocks share has another block's path
        inside = [n for n in calls if self.called or within(n.path, path)]
        self.norms: dict[int, list[_NormCall]] = {}
        for norm in inside:
            self.norms.setdefault(norm.given, []).append(norm)

    def steps(self) -> list[StreamStep]:
        sizes = self.recording.sizes
        for start in dict.fromkeys(self.events[0].seen.values()):
            ends = self.events[-1:] if self.called else self.events[-2:]
            goals = [n for e in ends for n in e.seen.values() if sizes[n] == sizes[start]]
            if goals and (steps := self._walk(start, goals[:1] if self.called else goals)):
                return steps
        return []

    def _walk(self, start: int, goals: Sequence[int]) -> list[StreamStep] | None:
        """Return the steps to the first goal that is met; the rest of a path shows whether a norm follows a
        sum.
        """
        size = self.recording.sizes[start]
        shown = ((n, event.side) for event in self.events for n in event.seen.values())
        seen = [(n, side) for n, side in shown if self.recording.sizes[n] == size]
        made = {n for n, side in seen if side == "output"}
        sums = Sums(list(dict.fromkeys(n for n, _ in seen)), made, self.recording.samples)

        @cache
        def walk(stream: int) -> list[StreamStep] | None:
            return [] if stream in goals else next(ways(stream), None)

        def ways(stream: int) -> Iterator[list[StreamStep]]:
            for one in sums.of(stream):
                normed = [(n.output, n.path) for n in self.norms.get(one.total, ())]
                for after, write in [(one.total, None), *normed]:
                    if (rest := walk(after)) is not None:
                        yield [StreamStep(stream, one, after, write), *rest]

        return walk(start)

    def named_steps(self, branches: Sequence[str]) -> list[StreamStep]:
        """Return the steps of the stream for branches named by their paths in the block: from the tensor
        before to the first new tensor after a branch, and after the last branch to the block's output.
        """
        sizes, steps = self.recording.sizes, list[StreamStep]()
        stream, paths = next(iter(self.events[0].seen.values())), {f"{self.path}.{b}" for b in branches}
        alike = [(e, [n for n in e.seen.values() if sizes[n] == sizes[stream]]) for e in self.events]
        ends = [i for i, (e, ns) in enumerate(alike) if e.path in paths and e.side == "output" and ns]
        for i, following in zip(ends, [*ends, len(alike)][1:], strict=True):
            known = {n for _, ns in alike[: i + 1] for n in ns}
            new = [n for _, ns in alike[i + 1 : following] for n in ns if n not in known]
            if self.called and i == ends[-1]:
                new = alike[-1][1]
            if new:
                steps.append(StreamStep(stream, Sum(new[0], (alike[i][1][0],)), new[0], verified=False))
                stream = new[0]
        return steps

    def first(self, number: int) -> int:
        return next(i for i, event in enumerate(self.events) if number in event.seen.values())

    def tap(self, number: int) -> Tap:
        """Return a tap of a tensor: where it enters or leaves the block, else where it is first seen."""
        if self.called and number in self.events[-1].seen.values():
            return self.events[-1].tap(number)
        return self.events[self.first(number)].tap(number)

    def branches(self, step: StreamStep) -> list[int]:
        """Return the terms of a step that were computed from its stream rather than just carried along."""
        return [y for y in step.sum.terms if self.first(y) > self.first(step.stream)]

    def side_by_side(self, step: StreamStep) -> bool:
        """Return whether a sum's branches are seen to be computed from what was there before all of them.

        A module that runs between them then receives it. If none does, a later branch may read the sum of the
        stream and an earlier one, through a norm that is a function and not a module.
        """
        sizes = self.recording.sizes
        begun, *_, ended = sorted(self.first(y) for y in self.branches(step))
        older = {n for e in self.events[:begun] for n in e.seen.values() if sizes[n] == sizes[step.stream]}
        between = [set(e.seen.values()) for e in self.events[begun:ended] if e.side == "input"]
        return any(older & seen for seen in between)

    def put_out(self, step: StreamStep, branch: int) -> list[ModuleEvent]:
        """Return the events that output a branch before its sum, latest first but identities last."""
        until = self.events[: self.first(step.sum.total)]
        shown = [e for e in reversed(until) if e.side == "output" and branch in e.seen.values()]
        return sorted(shown, key=lambda e: isinstance(self._modules[e.path], nn.Identity))

    def normed(self, branch: int) -> str | None:
        return next((n.path for calls in self.norms.values() for n in calls if n.output == branch), None)

    def read(self, step: StreamStep, shown: Sequence[ModuleEvent]) -> _NormRead | None:
        """Find the norm through which a branch reads the stream: of those applied to the stream, the one
        whose output is used nearest to the branch, directly if that is seen and otherwise scaled.
        """
        near: list[tuple[bool, int, int, _NormRead]] = []
        for norm in self.norms.get(step.stream, ()):
            made, summed = self.first(norm.output), self.first(step.sum.total)
            users = [e for e in self.events[made:summed] if e.side == "input" and e.path != norm.path]
            for i, user in enumerate(users):
                if factor := self._factor(user, norm.output):
                    common = max(len(shared([user.path, event.path])) for event in shown)
                    near.append((factor == 1.0, common, -i, _NormRead(norm.path, factor)))
        return max(near)[-1] if near else None

    def _factor(self, user: ModuleEvent, output: int) -> float | None:
        """Return the multiple of a norm's output that a module receives, perhaps in windows, or None."""
        sizes, samples = self.recording.sizes, self.recording.samples
        if output in user.seen.values():
            return 1.0
        for x in user.seen.values():
            if sizes[x] == sizes[output] and (k := _proportion(samples[x], samples[output])):
                return k
        return 1.0 if any(self.recording.rearranged(x, output) for x in user.seen.values()) else None

    def between(self, step: StreamStep) -> list[ModuleEvent]:
        """Return the events from the first appearance of a stream until its branches are added to it."""
        return self.events[self.first(step.stream) : self.first(step.sum.total)]

    def ran(self, step: StreamStep, outer: str) -> tuple[str, ...]:
        events = self.between(step)
        ended = {event.path for event in events if event.side == "output"}
        paths = [e.path for e in events if e.side == "input" and e.path in ended]
        inner = [p for p in paths if not outer or within(p, outer)]
        return tuple(dict.fromkeys([*inner, *([step.write] if step.write else [])]))

    def names(self, path: str) -> str:
        """Return the names and types of a (shared) module and of those around it in the block."""
        names, depth = path.split("."), len(self.path.split("."))
        start = depth if path == self.path else min(depth, len(names) - 1)
        below = names[start:]
        paths = [".".join(names[: start + i + 1]) for i in range(len(below))]
        return " ".join([*below, *(type(self._modules[p]).__name__ for p in paths)])

    def reads_memory(self, step: StreamStep, entered: Sequence[ModuleEvent]) -> bool:
        """Return whether a matrix receives an earlier tensor of the stream's shape, except for its length."""
        shapes = self.recording.shapes
        shape = shapes[step.stream]
        earlier = {n for e in self.recording.events[: self.start] for n in e.seen.values()} - {step.stream}
        alike = {n for n in earlier if len(shapes[n]) == len(shape)}
        memories = {n for n in alike if sum(map(ne, shapes[n], shape)) <= 1}
        return any(
            memories & set(event.seen.values())
            for event in entered
            if any(p.ndim > 1 for p in self._modules[event.path].parameters(recurse=False))
        )

    def role(self, step: StreamStep, shown: Sequence[ModuleEvent]) -> str:
        """Name the role of a branch by the names of the modules that output it, or else of those that ran
        before it was added; attention to a tensor from before its block is cross-attention.
        """
        ran = [event for event in self.between(step) if event.side == "input"]
        for words in [*(self.names(e.path) for e in shown), " ".join(self.names(e.path) for e in ran)]:
            if ATTENTION.search(words):
                return "cross_attention" if self.reads_memory(step, ran) else "self_attention"
            if FFN.search(words):
                return "ffn"
        return "branch"

    def second_streams(self, steps: Sequence[StreamStep]) -> bool:
        """Return whether the block outputs more than one new tensor of the stream's shape."""
        if not self.called:
            return False
        sizes, entered = self.recording.sizes, set(self.events[0].seen.values())
        out, size = set(self.events[-1].seen.values()), sizes[steps[0].stream]
        return any(sizes[n] == size for n in out - entered - {steps[-1].after})


def _proportion(x: Tensor, to: Tensor) -> float | None:
    """Return k if x is k times ``to`` within rounding, otherwise None."""
    x, to = x.double(), to.double()
    k = float((x * to).sum() / to.square().sum())
    return k if (x - k * to).norm() <= 1e-5 * x.norm() and k else None


def candidates(model: nn.Module, globs: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield containers with the paths of their possible blocks, outer ones first.

    They are the named ones, or else all modules whose children are numbered siblings: at least two of one
    type, or a list of one. Raises UserError for a name that fits no module.
    """
    modules = dict(model.named_modules())
    for name in globs:
        paths = [p for p in modules if fnmatchcase(p, name)]
        if name in modules:
            paths = [f"{name}.{child}" for child, _ in modules[name].named_children()]
        if not paths:
            some = ", ".join([path for path in modules if path][:8])
            raise UserError(f"blocks={name!r} fits no module of the model; the paths begin {some}, …")
        yield name, paths
    for path, module in () if globs else modules.items():
        for children in _siblings(module):
            yield path, [f"{path}.{child}" if path else child for child in children]


def _siblings(module: nn.Module) -> Iterator[list[str]]:
    """Yield, per common name, the children that differ only in a number and hold modules and a matrix."""
    stems: dict[str, dict[str, type[nn.Module]]] = {}
    for name, child in module.named_children():
        stem = re.sub(r"\d+", "", name)
        inside = next(child.children(), None) is not None and any(p.ndim > 1 for p in child.parameters())
        if stem != name and inside:
            stems.setdefault(stem, {})[name] = type(child)
    for children in stems.values():
        kinds = list(children.values())
        if len(kinds) > len(set(kinds)) or (isinstance(module, nn.ModuleList) and len(kinds) == 1):
            yield list(children)


def layer_of(path: str) -> int | None:
    """Return the first number in a path, which is the layer counted from 0, or None."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)
