"""Run folders, which hold the whole state of every run."""

from normlab.runs.folder import RunFolder, Runs, Status
from normlab.runs.lock import RunBusyError

__all__ = ["RunBusyError", "RunFolder", "Runs", "Status"]
