"""Run folders, which hold the whole state of every run."""

from .folder import RunBusyError, RunFolder, Runs, Status

__all__ = ["RunBusyError", "RunFolder", "Runs", "Status"]
