"""Run folders, which hold the whole state of every run."""

from .busy import RunBusyError
from .folder import RunFolder, Runs, Status

__all__ = ["RunBusyError", "RunFolder", "Runs", "Status"]
