"""``normlab explain``: what a property states, how it is tested, what it misses, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from normlab.checks.explanations import explanations
from normlab.checks.property import require_property
from normlab.cli import terminal
from normlab.cli.options import Switch


@dataclass(frozen=True)
class ExplainCommand:
    """List the properties that check tests, or explain some of them: statement, equation, public bug, what
    it cannot see, and what to do.
    """

    properties: Annotated[Positional[tuple[str, ...]], arg(metavar="PROPERTY")] = ()
    """Properties to explain, such as causality; without one, all are listed."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON instead of sentences."""

    def run(self) -> None:
        from normlab.parallel.explanations import (
            ranks_explanations,
        )  # with torch, which a wrong name needs not

        for name in self.properties:
            require_property(name, "explain")
        known = explanations() | ranks_explanations()
        shown = [known[name] for name in self.properties or known]
        if self.as_json:
            plain = [asdict(one) | {"source": one.source} for one in shown]
            print(json.dumps(plain, ensure_ascii=False))
        elif self.properties:
            terminal.write("\n\n".join("\n".join(one.lines()) for one in shown))
        else:
            width = max(map(len, known))
            terminal.write("\n".join(f"{name:<{width}}  {one.statement}" for name, one in known.items()))
