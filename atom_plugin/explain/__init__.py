"""What a launch would run and hold, worked out from a config on a machine that need not be the one it is for."""

from atom_plugin.explain.choices import Choice, explain, layer_modes
from atom_plugin.explain.plan import ExplainedSpec, Plan, outlines_of
from atom_plugin.explain.report import report

__all__ = ["Choice", "ExplainedSpec", "Plan", "explain", "layer_modes", "outlines_of", "report"]
