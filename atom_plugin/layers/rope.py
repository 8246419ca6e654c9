"""Rotary embedding from a RopeSpec, on SGLang's get_rope."""

from __future__ import annotations

from typing import Any

from torch import nn

from atom_plugin.configs import RopeSpec

#: Rope types that get_rope computes as transformers does. Not dynamic: transformers stretches by the length so far,
#: and get_rope by the longest there can be, from the first token on.
SERVED_TYPES = ("default", "linear", "llama3", "yarn")


def why_not_rope(spec: RopeSpec) -> list[str]:
    """Return why get_rope would not turn heads as transformers does; [] where it does."""
    if spec.rope_type not in SERVED_TYPES:
        return [
            f"rope type {spec.rope_type!r} is not served: SGLang computes it in another way than transformers. "
            f"Served: {', '.join(SERVED_TYPES)}"
        ]
    if "attention_factor" in dict(spec.scaling):
        return ["rope with attention_factor is not served: SGLang drops it, and scales by its factor and mscale alone"]
    return []


def make_rope(spec: RopeSpec, *, head_dim: int, max_position: int, is_neox: bool = True) -> nn.Module:
    """Return SGLang's rotary embedding over the first ``spec.rotary_dim`` of ``head_dim``; layers share its table.

    ``cos_sin_cache`` is ``[positions, rotary_dim]``: cosines of the ``rotary_dim / 2`` frequencies, then their sines,
    both times ``spec.cos_sin_scale``. ``is_neox``: the halves of the part turn together, otherwise neighbours do.
    Raises ValueError for a rope that SGLang computes in another way than transformers.
    """
    from sglang.srt.layers.rotary_embedding import get_rope  # here, so that `explain` needs no SGLang

    problems = why_not_rope(spec)
    if problems:
        raise ValueError("; ".join(problems))
    return get_rope(
        head_dim,
        rotary_dim=spec.rotary_dim,
        max_position=max_position,
        base=spec.theta,
        is_neox_style=is_neox,
        rope_scaling=_scaling(spec),
    )


def _scaling(spec: RopeSpec) -> dict[str, Any] | None:
    """Return the scaling in get_rope's form, None where there is nothing but theta."""
    scaling = {"rope_type": spec.rope_type, **dict(spec.scaling)}
    if spec.sections is not None:
        scaling |= {"mrope_section": list(spec.sections), "mrope_interleaved": True}
    return scaling if len(scaling) > 1 else None
