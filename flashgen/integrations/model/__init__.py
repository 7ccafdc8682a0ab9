"""`flashgen.integrate`: a model on flashgen's kernels, with a report of what serves each of its layers.

A model is routed (`routes`), run on example inputs while each call is counted by layer (`layers`), tuned by share of
time, compared with its own attention (`proof`), and reported on (`report`), with what a missing record costs by an
estimate (`misses`).
"""

from flashgen.integrations.model.integrate import integrate
from flashgen.integrations.model.proof import Comparison, Proof
from flashgen.integrations.model.report import Integration, LayerRow

__all__ = ["Comparison", "Integration", "LayerRow", "Proof", "integrate"]
