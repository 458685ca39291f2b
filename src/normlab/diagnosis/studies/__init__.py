"""Procedures of several passes that turn a subject into a table. None of them trains or leaves a trace."""

from importlib import import_module
from pkgutil import iter_modules

from normlab.diagnosis.study import Study, register

for module in iter_modules(__path__):
    for value in vars(import_module(f"{__name__}.{module.name}")).values():
        if isinstance(value, Study):
            register(value)
