"""Start the processes of a check of ranks, wait for them, and end all of them.

One process, the host, imports what all of them need and forks them: the ranks at the same time, then the same
script in one process, twice. All of them are in a group of processes of their own, which is ended as one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from normlab.errors import UserError
from normlab.parallel.job import Job

POLL_S: Final = 0.05
"""Seconds between two looks at whether a process has ended."""
GRACE_S: Final = 2.0
"""Seconds that others may take to say why they ended once one process has failed."""
LAST_LINES: Final = 3
"""How many of the last lines of a rank's output are shown if it does not end well."""
FAILURE: Final = "failure.json"
"""Where the host says what failed."""


class RanksError(UserError):
    """A process raised, died, or did not end in time."""

    def __init__(self, sentence: str, *, raised: bool) -> None:
        super().__init__(sentence)
        self.raised = raised
        """Whether the script itself raised, which it may not do in another precision."""


def stages_of(job: Job) -> list[tuple[str, list[Job]]]:
    """Return what is run one after the other, each with its jobs, which are run at the same time."""
    ranks = [replace(job, rank=rank) for rank in range(job.ranks)]
    return [
        (f"the script on {job.ranks} ranks", ranks),
        ("the script in one process", [replace(job, role="serial", ranks=1)]),
        ("its step with the gradients of all ranks' data", [replace(job, role="again", ranks=1)]),
    ]


# ----------------------------------------------------------------------------- in the process that asks


def run(job: Job, seconds: float, show: Callable[[str, int, int], None]) -> None:
    """Run all stages of a job within so many seconds; afterwards none of their processes is alive.

    Raises RanksError if a process does not end well.
    """
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as torchrun has it
    }
    command = [sys.executable, "-m", "normlab.parallel.host", str(job.write()), str(seconds)]
    host = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        _follow(host.stdout, len(stages_of(job)), show)
        code = host.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(host.pid, signal.SIGKILL)
        host.wait()
        for stream in (host.stdin, host.stdout):
            if stream is not None:
                stream.close()
    failure = Path(job.folder) / FAILURE
    if failure.is_file():
        raise RanksError(**json.loads(failure.read_text(encoding="utf-8")))
    if code:
        raise RanksError(f"the process that starts the ranks ended with code {code}", raised=False)


def _follow(lines: IO[bytes] | None, stages: int, show: Callable[[str, int, int], None]) -> None:
    """Show each stage that the host begins, until it closes its output."""
    for done, line in enumerate(lines or ()):
        show(line.decode().strip(), done, stages)


# ------------------------------------------------------------------------------------------ in the host


def run_stages(job: Job, ends: float, do: Callable[[Job], int]) -> None:
    """Run all stages, each job in a process of its own.

    Args:
        job: What to run.
        ends: When all must have ended, by ``time.monotonic()``.
        do: What each process calls with its job. If that leaves no result, the process exits with what it
            returns.

    Raises RanksError if one of them does not end well.
    """
    for name, jobs in stages_of(job):
        print(name, flush=True)  # noqa: T201 - the process that asks reads it
        port = free_port()
        running = {_forked(each, port, do): each for each in jobs}
        codes = _wait(running, ends)
        if not all(each.result.is_file() for each in jobs):
            raise _failure(jobs, [codes.get(each.name) for each in jobs])
        for number, each in running.items():
            if each.name not in codes:
                os.kill(number, signal.SIGKILL)
                os.waitpid(number, 0)


def _forked(job: Job, port: int, do: Callable[[Job], int]) -> int:
    """Start a job in a copy of this process, and return the copy's number."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        os.environ |= {
            "RANK": str(job.rank),
            "LOCAL_RANK": str(job.rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(job.ranks),
            "LOCAL_WORLD_SIZE": str(job.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        output = os.open(job.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, stream in ((nothing, 0), (output, 1), (output, 2)):  # of input, output and errors
            os.dup2(source, stream)
        code = do(job)
        sys.stdout.flush()
        sys.stderr.flush()
        while job.result.is_file():
            time.sleep(1)  # others may still hear from this one; the host ends all of them
    finally:
        os._exit(code)  # threads and groups of the script's may wait for others that are gone
    raise AssertionError("a process has ended and goes on")


def _wait(running: dict[int, Job], ends: float) -> dict[str, int]:
    """Wait until these processes have left their results or ended, one has failed, or the time is over.

    Return the exit codes of those that ended. If the process that asks is gone, end all of them and this one.
    """
    codes: dict[str, int] = {}
    failed_at = float("inf")
    while not all(job.result.is_file() or job.name in codes for job in running.values()):
        for number, job in running.items():
            if job.name not in codes:
                ended, status = os.waitpid(number, os.WNOHANG)
                if ended:
                    codes[job.name] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if any(codes.values()):
            failed_at = min(failed_at, now)
        if now > ends or now > failed_at + GRACE_S:
            break
        # nothing is ever written to this pipe: it is readable only once its other end is closed, because the
        # process that asks is gone
        if select.select([0], [], [], 0)[0]:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        time.sleep(POLL_S)
    return codes


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _failure(jobs: Sequence[Job], codes: Sequence[int | None]) -> RanksError:
    """Return the error that says which process failed, and how."""
    for job, code in zip(jobs, codes, strict=True):
        if code is not None and code < 0:  # what others say may only be that they miss it
            return RanksError(f"{_who(job)} was ended by signal {-code}{_last_lines(job)}", raised=False)
    with_sentence = [job for job in jobs if job.error.is_file()]
    if with_sentence:
        # of several, the first: the others may only say that they miss it
        first = min(with_sentence, key=lambda job: job.error.stat().st_mtime_ns)
        return RanksError(f"{_who(first)}: {first.error.read_text(encoding='utf-8').strip()}", raised=True)
    for job, code in zip(jobs, codes, strict=True):
        if code:
            return RanksError(f"{_who(job)} exited with code {code}{_last_lines(job)}", raised=False)
    waiting = [job for job in jobs if not job.result.is_file()]
    who = " and ".join(_who(job) for job in waiting)
    return RanksError(
        f"{who} did not finish a step in time; one may be waiting for another; a larger "
        f"--budget gives more time{_last_lines(waiting[0])}",
        raised=False,
    )


def _who(job: Job) -> str:
    return f"rank {job.rank} of {job.ranks}" if job.role == "rank" else f"{job.script} in one process"


def _last_lines(job: Job) -> str:
    with suppress(OSError):
        lines = job.output.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = [line.strip() for line in lines if line.strip()][-LAST_LINES:]
        if shown:
            return "; its last lines: " + " | ".join(shown)
    return ""
