"""Sound models, made of small methods and parts that a fault replaces one by one."""

from __future__ import annotations
