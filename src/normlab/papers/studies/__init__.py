"""normlab's own studies as objects; each is loaded when it measures, so papers need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from normlab.papers.artefact import Measurement


@dataclass(frozen=True)
class OwnStudy:
    """A function of ``normlab.papers.studies``."""

    module: str
    __name__: str
    version: int = 1
    """Raised when the same settings give other numbers, so earlier results are stale."""

    def __call__(self, lab: Any, **settings: Any) -> Measurement:
        """Measure by the function."""
        function = getattr(import_module(f"normlab.papers.studies.{self.module}"), self.__name__)
        found: Measurement = function(lab, **settings)
        return found


dependencies: Final = OwnStudy("amplification", "dependencies")
over_depth: Final = OwnStudy("amplification", "over_depth", version=2)
prefixes: Final = OwnStudy("amplification", "prefixes", version=2)
answers: Final = OwnStudy("trained", "answers")
encoder_gradients: Final = OwnStudy("gradients", "encoder_gradients")
fine_tuning: Final = OwnStudy("glue_search", "fine_tuning")
bounded_lengths: Final = OwnStudy("gradients", "bounded_lengths")
by_layer: Final = OwnStudy("gradients", "by_layer", version=2)
cross_attention: Final = OwnStudy("gradients", "cross_attention")
decay: Final = OwnStudy("gradients", "decay")
last_matrix: Final = OwnStudy("gradients", "last_matrix")
sublayer_outputs: Final = OwnStudy("gradients", "sublayer_outputs")
learned_scales: Final = OwnStudy("trained", "learned_scales")
attention_matrices: Final = OwnStudy("model_parts", "attention_matrices")
parameter_counts: Final = OwnStudy("model_parts", "parameter_counts")
table_1: Final = OwnStudy("model_parts", "table_1")
wrapped_blocks: Final = OwnStudy("model_parts", "wrapped_blocks")
profiles: Final = OwnStudy("amplification", "profiles")
speed: Final = OwnStudy("model_parts", "speed")
chi_square: Final = OwnStudy("lemmas", "chi_square")
hidden_scales: Final = OwnStudy("lemmas", "hidden_scales")
last_gradient: Final = OwnStudy("lemmas", "last_gradient")
norm_jacobian: Final = OwnStudy("lemmas", "norm_jacobian")
relu_scale: Final = OwnStudy("lemmas", "relu_scale")
trainings: Final = OwnStudy("trained", "trainings")
tuned: Final = OwnStudy("rate_search", "tuned")
