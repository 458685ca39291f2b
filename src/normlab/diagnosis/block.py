"""Follow the residual stream through a block, from sum to sum, and name its branches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normlab.diagnosis.norms import NormCall, Norms
from normlab.diagnosis.recording import ModuleEvent, Recording
from normlab.diagnosis.sums import Sum, Sums
from normlab.trace.facts.stacks import shared, within
from normlab.trace.tensors import Tap

ATTENTION = re.compile(r"att(n|ention)|mha", re.IGNORECASE)
FFN = re.compile(r"mlp|ff|feed_?forward|fc\d|intermediate|linear\d|dense|moe|expert|glu", re.IGNORECASE)


class _NormRead(NamedTuple):
    """The norm through which a branch reads the stream, and the factor on its output."""

    path: str
    factor: float


class StreamStep(NamedTuple):
    """A step of the stream from one tensor to the next: a sum and, in a Post-LN, the norm of the sum."""

    stream: int
    """The number of the tensor before the step."""
    sum: Sum
    after: int
    """The number of the tensor after it: the total of the sum, or what the norm makes of that."""
    write: str | None = None
    """The path of the norm of the sum, if there is one."""
    verified: bool = True
    """Whether the numbers show the sum; False if only the caller names its branch."""


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
        self.norms: dict[int, list[NormCall]] = {}
        """The calls of norms in the block, by the tensor that they are given."""
        for call in norms.calls(recording, start, stop):
            if self.called or within(call.path, path):  # one that blocks share has another block's path
                self.norms.setdefault(call.given, []).append(call)

    # ------------------------------------------------------------------------------- the steps of the stream

    def steps(self) -> list[StreamStep]:
        """Return the steps from a tensor that enters the block to one that leaves it; empty without any."""
        for start in dict.fromkeys(self.events[0].seen.values()):
            goals = self._goals(start)
            steps = self._walk(start, goals) if goals else None
            if steps:
                return steps
        return []

    def _goals(self, start: int) -> list[int]:
        """Return the tensors of a stream's size with which the block may end: the first that it returns, or
        all in its last two events.
        """
        ends = self.events[-1:] if self.called else self.events[-2:]
        goals = [number for event in ends for number in self._of_size(event, start)]
        return goals[:1] if self.called else goals

    def _of_size(self, event: ModuleEvent, like: int) -> list[int]:
        """Return the tensors of an event that have as many rows as another, and as wide ones."""
        sizes = self.recording.sizes
        return [number for number in event.seen.values() if sizes[number] == sizes[like]]

    def _walk(self, start: int, goals: Sequence[int]) -> list[StreamStep] | None:
        """Return the steps to the first goal that is met; the rest of a path shows whether a norm follows a
        sum.
        """
        seen = [(number, event.side) for event in self.events for number in self._of_size(event, start)]
        made = {number for number, side in seen if side == "output"}
        in_order = list(dict.fromkeys(number for number, _ in seen))
        sums = Sums(in_order, made, self.recording.samples)

        @cache  # several paths may lead to the same tensor
        def walk(stream: int) -> list[StreamStep] | None:
            if stream in goals:
                return []
            for step in steps_from(stream):
                rest = walk(step.after)
                if rest is not None:
                    return [step, *rest]
            return None

        def steps_from(stream: int) -> Iterator[StreamStep]:
            for addition in sums.of(stream):
                yield StreamStep(stream, addition, addition.total)
                for norm in self.norms.get(addition.total, ()):
                    yield StreamStep(stream, addition, norm.output, norm.path)

        return walk(start)

    def named_steps(self, branches: Sequence[str]) -> list[StreamStep]:
        """Return the steps of the stream for branches named by their paths in the block: from the tensor
        before to the first new tensor after a branch, and after the last branch to the block's output.
        """
        stream = next(iter(self.events[0].seen.values()))
        numbers = [self._of_size(event, stream) for event in self.events]
        paths = {f"{self.path}.{branch}" for branch in branches}
        ends = [
            i
            for i, event in enumerate(self.events)
            if event.path in paths and event.side == "output" and numbers[i]
        ]
        steps: list[StreamStep] = []
        for end, next_end in pairwise([*ends, len(self.events)]):
            known = {number for those in numbers[: end + 1] for number in those}
            later = [number for those in numbers[end + 1 : next_end] for number in those]
            new = [number for number in later if number not in known]
            if self.called and end == ends[-1]:
                new = numbers[-1]
            if new:
                total, branch = new[0], numbers[end][0]
                steps.append(StreamStep(stream, Sum(total, (branch,)), total, verified=False))
                stream = total
        return steps

    # ---------------------------------------------------------------------------------- the tensors of a step

    def first_event(self, number: int) -> int:
        """Return the place among the events at which a tensor is first seen."""
        return next(i for i, event in enumerate(self.events) if number in event.seen.values())

    def tap(self, number: int) -> Tap:
        """Return a tap of a tensor: where it enters or leaves the block, else where it is first seen."""
        if self.called and number in self.events[-1].seen.values():
            return self.events[-1].tap(number)
        return self.events[self.first_event(number)].tap(number)

    def branches(self, step: StreamStep) -> list[int]:
        """Return the terms of a step that were computed from its stream rather than just carried along."""
        stream = self.first_event(step.stream)
        return [y for y in step.sum.terms if self.first_event(y) > stream]

    def side_by_side(self, step: StreamStep) -> bool:
        """Return whether the branches of a sum are seen to be parallel, and not one after the other.

        Both of these have the total x + y1 + y2::

            parallel:  x ---> A ---> y1         one after the other:  x ------------> A ---> y1
                       x ---> B ---> y2                               norm(x + y1) ---> B ---> y2

        In the second, no module shows x + y1 if sum and norm are functions. What tells them apart is what the
        modules of B are given once y1 is there: x, its norm, or anything else from before y1, or else a new
        tensor. If no module is seen to be given something older, the branches may be one after the other.
        """
        put_out = [self.first_event(y) for y in self.branches(step)]
        first, last = min(put_out), max(put_out)
        older = {number for event in self.events[:first] for number in self._of_size(event, step.stream)}
        for event in self.events[first:last]:
            if event.side == "input" and older & set(event.seen.values()):
                return True
        return False

    def outputs_of(self, step: StreamStep, branch: int) -> list[ModuleEvent]:
        """Return the events that output a branch before its sum, latest first but identities last."""
        before_sum = self.events[: self.first_event(step.sum.total)]
        outputs = [e for e in reversed(before_sum) if e.side == "output" and branch in e.seen.values()]
        return sorted(outputs, key=lambda event: isinstance(self._modules[event.path], nn.Identity))

    def second_streams(self, steps: Sequence[StreamStep]) -> bool:
        """Return whether the block outputs more than one new tensor of the stream's shape."""
        if not self.called:
            return False
        entered = set(self.events[0].seen.values())
        left = set(self._of_size(self.events[-1], steps[0].stream))
        return bool(left - entered - {steps[-1].after})

    # ------------------------------------------------------------------------------------------------- norms

    def norm_at_end(self, branch: int) -> str | None:
        """Return the path of the norm that outputs a branch, if one does."""
        calls = (call for calls in self.norms.values() for call in calls)
        return next((call.path for call in calls if call.output == branch), None)

    def norm_at_start(self, step: StreamStep, outputs: Sequence[ModuleEvent]) -> _NormRead | None:
        """Find the norm through which a branch reads the stream.

        Of the norms that are applied to the stream, it is the one whose output is given to a module directly
        rather than scaled; of several such, to the module that shares most of its path with what outputs the
        branch; of several such modules, to the first.
        """
        summed = self.first_event(step.sum.total)
        ranked: list[tuple[bool, int, int, _NormRead]] = []
        for norm in self.norms.get(step.stream, ()):
            after_norm = self.events[self.first_event(norm.output) : summed]
            users = [event for event in after_norm if event.side == "input" and event.path != norm.path]
            for order, user in enumerate(users):
                factor = self._factor(user, norm.output)
                if factor is not None:
                    names_shared = max(len(shared([user.path, output.path])) for output in outputs)
                    is_direct = factor == 1.0
                    ranked.append((is_direct, names_shared, -order, _NormRead(norm.path, factor)))
        return max(ranked)[-1] if ranked else None

    def _factor(self, user: ModuleEvent, output: int) -> float | None:
        """Return the multiple of a norm's output that a module receives, perhaps in windows, or None."""
        received = list(user.seen.values())
        if output in received:
            return 1.0
        samples = self.recording.samples
        for x in self._of_size(user, output):
            factor = _proportion(samples[x], samples[output])
            if factor is not None:
                return factor
        in_windows = any(self.recording.rearranged(x, output) for x in received)
        return 1.0 if in_windows else None

    # ----------------------------------------------------------------------------------------- modules, roles

    def between(self, step: StreamStep) -> list[ModuleEvent]:
        """Return the events from the first appearance of a stream until its branches are added to it."""
        return self.events[self.first_event(step.stream) : self.first_event(step.sum.total)]

    def modules_run(self, step: StreamStep, inside: str) -> tuple[str, ...]:
        """Return the modules that begin and end in a step, and the norm of the sum; of those, if ``inside``
        is not empty, the ones inside that module.
        """
        events = self.between(step)
        ended = {event.path for event in events if event.side == "output"}
        paths = [event.path for event in events if event.side == "input" and event.path in ended]
        if inside:
            paths = [path for path in paths if within(path, inside)]
        if step.write:
            paths.append(step.write)
        return tuple(dict.fromkeys(paths))

    def role(self, step: StreamStep, outputs: Sequence[ModuleEvent]) -> str:
        """Name the role of a branch by the names of the modules that output it, or else of those that ran
        before it was added; attention to a tensor from before its block is cross-attention.
        """
        entered = [event for event in self.between(step) if event.side == "input"]
        names = [self._names(event.path) for event in outputs]
        names.append(" ".join(self._names(event.path) for event in entered))
        for words in names:
            if ATTENTION.search(words):
                return "cross_attention" if self._reads_memory(step, entered) else "self_attention"
            if FFN.search(words):
                return "ffn"
        return "branch"

    def _names(self, path: str) -> str:
        """Return the names and types of a (shared) module and of those around it in the block."""
        names, depth = path.split("."), len(self.path.split("."))
        start = depth if path == self.path else min(depth, len(names) - 1)
        paths = [".".join(names[: end + 1]) for end in range(start, len(names))]
        types = [type(self._modules[inner]).__name__ for inner in paths]
        return " ".join([*names[start:], *types])

    def _reads_memory(self, step: StreamStep, entered: Sequence[ModuleEvent]) -> bool:
        """Return whether a module with a matrix of its own is given a tensor from before the block, of the
        stream's shape but perhaps of another length.
        """
        shapes = self.recording.shapes
        before_block = self.recording.events[: self.start]
        earlier = {number for event in before_block for number in event.seen.values()} - {step.stream}
        memories = {number for number in earlier if _alike(shapes[number], shapes[step.stream])}
        for event in entered:
            has_matrix = any(p.ndim > 1 for p in self._modules[event.path].parameters(recurse=False))
            if has_matrix and memories & set(event.seen.values()):
                return True
        return False


def _alike(shape: torch.Size, other: torch.Size) -> bool:
    """Return whether two shapes differ in at most one of their lengths."""
    if len(shape) != len(other):
        return False
    return sum(a != b for a, b in zip(shape, other, strict=True)) <= 1


def _proportion(x: Tensor, to: Tensor) -> float | None:
    """Return k if x is k times ``to`` within rounding and not zero, otherwise None."""
    x, to = x.double(), to.double()
    k = float((x * to).sum() / to.square().sum())
    is_multiple = bool((x - k * to).norm() <= 1e-5 * x.norm())
    return k if is_multiple and k else None
