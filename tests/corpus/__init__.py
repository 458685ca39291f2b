"""Training steps with a fault, each with the properties that must name it, and sound steps beside them.

``faults`` has a module for each property of ``normlab.check``, or for a few that are alike: what is broken,
the module at which it must be named, and its sound twin if it has one. ``sound`` has the other sound steps,
by kind of model. Both are made of the ``models``, ``batches`` and ``training`` that all cases share: a fault
is a subclass of one of their parts, or a change of one model. ``case`` says what a case is and where cases
come from, ``judge`` what a check says of one, and ``run`` is the command:
``python tests/corpus/run.py -j 2``.
"""
