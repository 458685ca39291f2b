"""``normlab explain``: what a property states, how it is tested, what it misses, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from normlab.checks.explanations import explanations
from normlab.checks.property import require_property
from normlab.cli import terminal
from normlab.cli.options import Imports, Switch


@dataclass(frozen=True)
class ExplainCommand:
    """List the properties that check tests, or explain some of them: statement, equation, public bug, what
    it cannot see, and what to do.
    """

    properties: Annotated[Positional[tuple[str, ...]], arg(metavar="PROPERTY")] = ()
    """Properties to explain, such as causality; without one, all are listed."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON instead of sentences."""
    imports: Imports = ()

    def run(self) -> None:
        for name in self.properties:
            require_property(name, "explain")
        # loads torch, which need not be waited for if a name is wrong
        from normlab.parallel.explanations import ranks_explanations

        known = explanations() | ranks_explanations()
        chosen = [known[name] for name in self.properties or known]
        if self.as_json:
            documents = [asdict(explanation) | {"source": explanation.source} for explanation in chosen]
            print(json.dumps(documents, ensure_ascii=False))
        elif self.properties:
            terminal.write("\n\n".join("\n".join(explanation.lines()) for explanation in chosen))
        else:
            width = max(map(len, known))
            lines = [f"{name:<{width}}  {explanation.statement}" for name, explanation in known.items()]
            terminal.write("\n".join(lines))
