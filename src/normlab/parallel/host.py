"""The process that forks all others of a check of ranks: it imports what they need, once."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from normlab.parallel.job import Job
from normlab.parallel.launch import FAILURE, RanksError, run_stages
from normlab.parallel.process import do


def main(path: str, seconds: str) -> int:
    """Run all stages of a job within so many seconds; return the exit code."""
    ends = time.monotonic() + float(seconds)
    job = Job.read(path)
    try:
        run_stages(job, ends, do)
    except RanksError as error:
        failure = {"sentence": str(error), "raised": error.raised}
        (Path(job.folder) / FAILURE).write_text(json.dumps(failure), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2]))  # whatever is still running is ended by the one that asked
