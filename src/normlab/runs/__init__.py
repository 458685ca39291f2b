"""Run folders, which hold the whole state of every run."""

from normlab.runs.files import RunBusyError
from normlab.runs.folder import RunFolder, Runs, Status

__all__ = ["RunBusyError", "RunFolder", "Runs", "Status"]
