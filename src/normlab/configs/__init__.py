"""Complete configurations as Python functions, by name; papers are imported when they are asked for."""

from collections.abc import Callable

from normlab.spec.config import Config

from .bert import bert
from .demo import demo
from .gl_en import gl_en, gl_en_small
from .glue import classification, mrpc, rte
from .language_model import language_model
from .multi30k import multi30k, multi30k_small
from .text import text

CONFIGS: dict[str, Callable[[], Config]] = {
    f.__name__: f
    for f in (
        *(bert, classification, demo, gl_en, gl_en_small, language_model),
        *(mrpc, multi30k, multi30k_small, rte, text),
    )
}
"""Name to configuration; ``normlab train --config NAME``."""
