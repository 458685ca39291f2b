"""Run a baseline and a candidate, seed after seed, until it is decided whether the candidate is better.

The answer follows from the seeds in their order: runs that end early wait for those before them, and what was
run beyond the deciding seed does not count. So it is the same for any number of jobs, and after any
interruption.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np

from normlab.base.files import write_json_atomic
from normlab.base.locks import reserved
from normlab.errors import UserError
from normlab.judging.command import Command
from normlab.judging.difference import Interval
from normlab.judging.experiment import BASELINE, CANDIDATE, SIDES, Experiment, KilledRun, Request, SideRun
from normlab.judging.judgement import KEEP, UNDECIDED
from normlab.judging.kept import RECORD, scored
from normlab.judging.ledger import Ledger, Question, Score
from normlab.judging.logs import compiled, last_lines
from normlab.judging.run import FAILED, ScoreOptions, Take
from normlab.judging.runner import PLACES, Process, Runs
from normlab.judging.sequential import Decision, Judge
from normlab.judging.statistics import mean_margin

BROKEN_AFTER: Final = 2
"""If so many first runs of a command give no score, the command does not work: an error, not a result."""
TRIES: Final = 2
"""A run that signals kill is started at most so many times."""
INTERRUPTED: Final = "it was interrupted"
Progress = Callable[[str, int, int], None]
"""Is told what begins, how many seeds are judged, and how many there are at most."""
RunKey = tuple[int, str]
"""A seed and a side."""


def experiment(request: Request, progress: Progress = lambda name, done, of: None) -> Experiment:
    """Run baseline and candidate with one seed after the other until it is decided.

    Runs that have ended are not repeated, as long as the command's words and the content of its files are the
    same. Ctrl-C ends the runs in progress, and gives the answer so far. The last answer is kept in the
    folder's ``judge.json``.

    Raises:
        UserError: a command has no ``{seed}``, does not work, or prints no score.
    """
    with reserved(request.folder):
        experimenter = _Experimenter(request, progress)
        answer = experimenter.run_with_ledger() if request.ledger else experimenter.run()
        write_json_atomic(request.folder / RECORD, answer.to_dict())
    return answer


class _Experimenter:
    """The state of an experiment in progress."""

    def __init__(self, request: Request, progress: Progress) -> None:
        self.request, self.progress = request, progress
        self.pattern = compiled(request.metric)
        self.options = ScoreOptions(take=Take.of(request.take), higher_is_better=request.higher_is_better)
        self.place = PLACES[request.on]
        texts = {BASELINE: request.baseline, CANDIDATE: request.candidate}
        self.commands = {
            side: Command.of(text, request.depends, name=f"--{side}") for side, text in texts.items()
        }
        if self.commands[BASELINE].id == self.commands[CANDIDATE].id:
            raise UserError("--baseline and --candidate are the same command; change one of them")
        self.stamps = {side: command.stamp() for side, command in self.commands.items()}
        self.runs = {side: Runs(request.folder, command) for side, command in self.commands.items()}
        self.seeds = range(request.first_seed, request.first_seed + request.max_seeds)
        self.results: dict[RunKey, SideRun] = {}
        self.reused: set[RunKey] = set()
        """Runs that an earlier experiment has ended."""
        self.killed: dict[RunKey, KilledRun] = {}
        """Runs that signals have killed, so far without a result."""
        self.judge = _judge_of(request)
        self.judged: list[int] = []
        """The seeds that were judged, in their order."""
        self.begun = time.monotonic()
        self.ran = 0
        self.ended_by = ""

    def run_with_ledger(self) -> Experiment:
        """Judge at the level that the ledger sets, and enter the answer.

        The proposal is entered before anything runs: a level that was seen is spent.
        """
        request = self.request
        score = Score(request.metric, request.take, request.higher_is_better)
        ledger = Ledger.read(request.folder).judged_by(score)
        ids = [self.commands[side].id for side in SIDES]
        question = Question(*ids, margin=request.margin, first_seed=request.first_seed)
        proposal = ledger.find(question, self.commands[CANDIDATE].text)
        ledger = ledger.written(proposal)
        self.request = replace(request, level=proposal.level)
        self.judge = _judge_of(self.request)
        try:
            answer = self.run()
        except UserError:
            if not self._has_seen_a_score():
                ledger.without(proposal)
            raise
        if answer.verdict == KEEP:
            answer = self._measured_again(answer)
        decision = answer.decision
        proposal = replace(
            proposal,
            verdict=answer.verdict,
            seeds=decision.seeds,
            gain=decision.gain,
            measured=answer.fresh,
            fresh_seeds=answer.fresh_seeds,
        )
        return replace(answer, ledger=ledger.written(proposal, answer.digits))

    def _has_seen_a_score(self) -> bool:
        """Whether a run of the candidate has given a score: its level is spent then."""
        return any(side == CANDIDATE and run.outcome != FAILED for (_, side), run in self.results.items())

    def _measured_again(self, answer: Experiment) -> Experiment:
        """Measure the gain of a kept change on seeds beyond those that could decide: a change is kept if its
        gain looks large, so what was seen of it is too large on average (winner's curse).
        """
        seeds = range(self.seeds.stop, self.seeds.stop + self.request.fresh_seeds)
        waiting = self._not_ended(seeds)
        try:
            self._run_all(waiting, is_over=lambda: False)
        except KeyboardInterrupt:
            self.ended_by = INTERRUPTED
        gains = [gain for seed in seeds if (gain := self._gain(seed)) is not None]
        if not gains:
            return answer
        mean, margin = (float(value) for value in mean_margin(np.array(gains)))
        gain = Interval(mean) if math.isnan(margin) else Interval(mean, mean - margin, mean + margin)
        seconds = time.monotonic() - self.begun
        killed = tuple(self.killed.values())
        return replace(
            answer, fresh=gain, fresh_seeds=len(gains), ran=self.ran, seconds=seconds, killed=killed
        )

    def _gain(self, seed: int) -> float | None:
        """By how much the candidate is better at a seed; None if one of the two runs has no score."""
        baseline, candidate = (self.results.get((seed, side)) for side in SIDES)
        if baseline is None or candidate is None or baseline.score is None or candidate.score is None:
            return None
        gain = candidate.score - baseline.score
        return gain if self.request.higher_is_better else -gain

    def run(self) -> Experiment:
        """Run until it is decided, or until it cannot be."""
        waiting = self._not_ended(self.seeds)
        self._judge_what_is_known()
        try:
            self._run_all(waiting, self._is_over)
        except KeyboardInterrupt:
            self.ended_by = INTERRUPTED
        return self._answer()

    def _not_ended(self, seeds: range) -> deque[RunKey]:
        """The runs of some seeds that have still to be made, in their order; the others are read."""
        waiting = deque[RunKey]()
        for seed in seeds:
            for side in SIDES:
                if self.runs[side].ended(seed) is None:
                    waiting.append((seed, side))
                else:
                    self._read(seed, side)
                    self.reused.add((seed, side))
        return waiting

    def _run_all(self, waiting: deque[RunKey], is_over: Callable[[], bool]) -> None:
        """Run what waits, in its order, until that is over or nothing more fits into the budget."""
        running: dict[Future[None], tuple[int, str, Process]] = {}
        with _threads_of(running, self.request.jobs) as threads:
            while (waiting or running) and not is_over():
                while waiting and len(running) < self.request.jobs and self._fits(waiting[0][1]):
                    seed, side = waiting.popleft()
                    process = self._start(seed, side)
                    if process is not None:
                        running[threads.submit(process.wait)] = (seed, side, process)
                if running:
                    waiting.extendleft(self._wait_for_one_of(running))
                elif waiting:
                    self.ended_by = "the budget is spent"
                    return
                self._judge_what_is_known()

    def _wait_for_one_of(self, running: dict[Future[None], tuple[int, str, Process]]) -> list[RunKey]:
        """Wait until a run has ended, and read each that has. Returns those to try again."""
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        again = list[RunKey]()
        for future in done:
            seed, side, _ = running.pop(future)
            future.result()  # raises what went wrong with its place
            self.ran += 1
            if number := self.runs[side].folder(seed).killed_by():
                before = self.killed.get((seed, side))
                times = 1 if before is None else before.times + 1
                self.killed[seed, side] = KilledRun(seed, side, number, times)
                if times < TRIES:
                    again.append((seed, side))
            else:
                self.killed.pop((seed, side), None)
                self._read(seed, side)
        return again

    def _start(self, seed: int, side: str) -> Process | None:
        """Start a run; None if a process that an earlier experiment started has ended it meanwhile.

        Raises UserError if a file of the command has changed: its runs would be those of two commands.
        """
        if self.commands[side].stamp() != self.stamps[side]:
            raise UserError(
                f"a file of the {side} was changed while it was judged; type the same command again for runs "
                "of the new one"
            )
        self.progress(f"seed {seed}, {side}", len(self.judged), self.request.max_seeds)
        process = self.runs[side].start(seed, self.place)
        if process is None:
            self._read(seed, side)
            self.reused.add((seed, side))
        return process

    def _fits(self, side: str) -> bool:
        """Whether a run would end within the budget, going by those that have ended."""
        if math.isinf(self.request.budget_s):
            return True
        seconds = self.runs[side].seconds()
        expected_s = median(seconds) if seconds else 0.0
        left_s = self.request.budget_s - (time.monotonic() - self.begun)
        return left_s > expected_s

    def _is_over(self) -> bool:
        decision = self.judge.decision
        if self.ended_by or decision.decided or len(self.judged) == self.request.max_seeds:
            return True
        return decision.hopeless and not self.request.patient

    # ---------------------------------------------------------------------------------------------- scores
    def _read(self, seed: int, side: str) -> None:
        """Read what a run that has ended gave."""
        folder = self.runs[side].folder(seed)
        run = scored(folder, side, self.pattern, self.options)
        record = folder.ended()
        seconds = record.seconds if record else 0.0
        self.results[seed, side] = SideRun(run.outcome, run.score, seconds, run.reason)

    def _judge_what_is_known(self) -> None:
        """Judge the seeds whose two runs have ended, as far as no seed before them is open."""
        for seed in self.seeds[len(self.judged) :]:
            first, second = (self.results.get((seed, side)) for side in SIDES)
            if self._is_over():
                return
            lost = [run for run in self.killed.values() if run.seed == seed and run.times == TRIES]
            if lost:
                self.ended_by = lost[0].sentence
                return
            if first is None or second is None:
                return
            self.judge.add(seed, first.score, second.score)
            self.judged.append(seed)
            self._require_working()

    def _require_working(self) -> None:
        """Raise UserError if the first runs of a command have all ended in an error, or without a score."""
        if len(self.judged) != BROKEN_AFTER:
            return
        for side in SIDES:
            runs = [self.results[seed, side] for seed in self.judged]
            if all(run.outcome == FAILED for run in runs):
                folders = [self.runs[side].folder(seed) for seed in self.judged]
                log = folders[-1].log
                for folder in folders:
                    folder.forget()
                raise UserError(
                    f"the {side} gave no score with its first {len(runs)} seeds: {runs[-1].reason}; look at "
                    f"{log}, which ends with: {last_lines(log) or 'nothing'}"
                )

    # ---------------------------------------------------------------------------------------------- answer
    def _answer(self) -> Experiment:
        decision = self.judge.decision
        return Experiment(
            request=self.request,
            decision=decision,
            baseline=self.commands[BASELINE],
            candidate=self.commands[CANDIDATE],
            seeds=tuple(self.judged),
            runs={side: tuple(self.results[seed, side] for seed in self.judged) for side in SIDES},
            reused=sum((seed, side) in self.reused for seed in self.judged for side in SIDES),
            ran=self.ran,
            seconds=time.monotonic() - self.begun,
            ended_by=self._why_undecided(decision),
            killed=tuple(self.killed.values()),
            digits=self.judge.metric.digits,
        )

    def _why_undecided(self, decision: Decision) -> str:
        if decision.verdict != UNDECIDED:
            return ""
        if self.ended_by:
            return self.ended_by
        if len(self.judged) == self.request.max_seeds:
            return f"--max-seeds is {self.request.max_seeds}"
        if decision.hopeless:
            return f"{self.request.max_seeds} seeds would hardly decide it; --patient tries all the same"
        return ""


def _judge_of(request: Request) -> Judge:
    return Judge(
        margin=request.margin,
        higher_is_better=request.higher_is_better,
        level=request.level,
        max_seeds=request.max_seeds,
    )


@contextmanager
def _threads_of(
    running: dict[Future[None], tuple[int, str, Process]], jobs: int
) -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for one process each; those that still run at the end of the block are stopped."""
    threads = ThreadPoolExecutor(jobs, "run")
    try:
        yield threads
    finally:
        for _, _, process in running.values():
            process.stop()
        threads.shutdown(wait=True)
