"""The papers' tables and figures as data, one file a paper; no torch."""
