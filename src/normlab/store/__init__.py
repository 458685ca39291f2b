"""Run folders: the truth about every run."""

from .folder import RunBusyError, RunFolder, Runs, Status

__all__ = ["RunBusyError", "RunFolder", "Runs", "Status"]
