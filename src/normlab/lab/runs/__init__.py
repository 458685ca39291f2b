"""Run folders, which hold the whole state of every run."""

from normlab.base.locks import RunBusyError
from normlab.lab.runs.folder import RunFolder, Runs, Status

__all__ = ["RunBusyError", "RunFolder", "Runs", "Status"]
