"""One layer's call of the backend: what it hands over beside q, and what goes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atom_plugin.attention.qk_norm_rope import QKNormRope, declared_by
from atom_plugin.ops.indices import TokenSlots


@dataclass(frozen=True, kw_only=True)
class Rope:
    """What a model hands over with un-normed, un-rotated q and k."""

    cos_sin_cache: torch.Tensor
    is_neox: bool

    @classmethod
    def of(cls, cos_sin_cache: torch.Tensor | None, is_neox: bool | None, layer: Any) -> Rope | None:
        """Return what the kwargs say, None without them; ValueError where one of the two is missing."""
        if (cos_sin_cache is None) != (is_neox is None):
            alone = "is_neox" if cos_sin_cache is None else "cos_sin_cache"
            raise ValueError(
                f"attention layer {layer.layer_id} got {alone} alone: cos_sin_cache and is_neox belong together"
            )
        if cos_sin_cache is None or is_neox is None:
            return None
        return cls(cos_sin_cache=cos_sin_cache, is_neox=is_neox)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One layer's call, apart from q. ``q_rope``, ``k_rope``: the rotated parts where MLA hands them over apart."""

    layer: Any
    forward_batch: Any
    k: torch.Tensor | None
    v: torch.Tensor | None
    stores: bool
    return_lse: bool
    rope: Rope | None
    q_rope: torch.Tensor | None
    k_rope: torch.Tensor | None
    sinks: torch.Tensor | None

    def slots(self, num_tokens: int) -> TokenSlots:
        """Return where the new tokens are stored."""
        return TokenSlots(slots_T=first(num_tokens, self.forward_batch.out_cache_loc))

    def constants(self) -> QKNormRope:
        """Return what the layer declares for norm and rope, or raise ValueError where it declares nothing."""
        constants = declared_by(self.layer)
        if constants is None:
            raise ValueError(
                f"attention layer {self.layer.layer_id} got cos_sin_cache, and has no qk_norm_rope "
                f"(atom_plugin.attention.qk_norm_rope.QKNormRope) that says how to norm and rotate"
            )
        assert self.rope is not None
        if self.rope.cos_sin_cache.shape[1] != constants.rotary_dim:
            raise ValueError(
                f"attention layer {self.layer.layer_id} got a cos_sin_cache of {self.rope.cos_sin_cache.shape[1]} "
                f"columns, its qk_norm_rope says rotary_dim={constants.rotary_dim}"
            )
        return constants

    def positions(self, constants: QKNormRope, num_tokens: int) -> torch.Tensor:
        """Return the positions of the new tokens: SGLang 0.5.17 narrows q to the real rows, and not them."""
        source = constants.position_source
        positions: torch.Tensor | None = (
            self.forward_batch.positions if source == "positions" else self.forward_batch.mrope_positions
        )
        if positions is None:
            raise ValueError(f"attention layer {self.layer.layer_id} rotates by {source}, the batch has none")
        return positions if positions.shape[-1] == num_tokens else positions[..., :num_tokens]

    def refuse(self, **options: bool) -> None:
        """Raise ValueError, naming all of them, where an option that the layer does not take is given."""
        given = [name for name, is_given in options.items() if is_given]
        if given:
            raise ValueError(f"attention layer {self.layer.layer_id} takes no {', '.join(given)} in this call")


def first(num_tokens: int, rows: torch.Tensor) -> torch.Tensor:
    """Return the first ``num_tokens`` rows; a slice that changes nothing costs 3 us a tensor in a decode step."""
    return rows if rows.shape[0] == num_tokens else rows[:num_tokens]


def output(
    out_THD: torch.Tensor, lse_TH: torch.Tensor | None, *, num_rows: int, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return what SGLang expects, with zeros (and an lse of -inf) for ``num_rows`` rows past the real ones."""
    padding = num_rows - out_THD.shape[0]
    if padding:
        out_THD = torch.nn.functional.pad(out_THD, (0, 0, 0, 0, 0, padding))
    if not return_lse:
        return out_THD.flatten(1)
    if lse_TH is None:
        lse_TH = out_THD.new_empty(0, out_THD.shape[1], dtype=torch.float32)
    return out_THD, torch.nn.functional.pad(lse_TH, (0, 0, 0, padding), value=-torch.inf)
