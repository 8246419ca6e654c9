"""Rotary embedding from a RopeSpec, on SGLang's get_rope."""

from __future__ import annotations

from sglang.srt.layers.rotary_embedding import get_rope
from torch import nn

from atom_plugin.configs import RopeSpec


def make_rope(spec: RopeSpec, *, head_dim: int, max_position: int) -> nn.Module:
    """Return SGLang's rotary embedding over all of ``head_dim``, neox style; its ``cos_sin_cache`` is shared by layers.

    ``cos_sin_cache`` is ``[positions, head_dim]``: cosines of the ``head_dim / 2`` frequencies, then their sines.
    """
    return get_rope(
        head_dim,
        rotary_dim=head_dim,
        max_position=max_position,
        base=spec.theta,
        rope_scaling=spec.scaling_dict(),
    )
