"""Procedures with several passes: from a subject to a table. None of them trains or leaves a trace."""
