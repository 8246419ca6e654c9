"""Routed experts, in the spellings of different families and transformers versions."""

from __future__ import annotations

from atom_plugin.configs.fields import Fields

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token")


def read_top_k(fields: Fields, experts: int) -> int:
    """Return how many of ``experts`` a token goes to; raise ConfigError when there are fewer than that."""
    top_k = fields.positive(*TOP_K)
    if top_k > experts:
        name = next(name for name in TOP_K if fields.has(name))
        raise fields.error(name, f"it must be at most num_experts = {experts}")
    return top_k
