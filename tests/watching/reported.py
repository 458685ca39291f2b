"""Keeps the reports of a recorder."""

from __future__ import annotations

from typing import Any


class Kept:
    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def flights(self) -> list[dict[str, Any]]:
        return self.reports

    def add_flight(self, report: dict[str, Any]) -> None:
        self.reports.append(report)
