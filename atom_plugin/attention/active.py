"""What the backend takes that runs a batch: ours or one of SGLang's, alone or inside of SGLang's wrappers."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from atom_plugin import host


def is_ours(backend: Any) -> bool:
    """Return whether an SGLang AttentionBackend that wraps no other is ours."""
    return isinstance(backend, _our_class())


def takes_qk_norm_rope(backend: Any, forward_mode: Any) -> bool:
    """Return whether ``backend`` takes un-normed, un-rotated q and k with ``cos_sin_cache`` and ``is_neox``.

    ``backend``: the active SGLang AttentionBackend, wrapped or not; ``forward_mode``: the batch's. SGLang's wrappers
    are looked through, as their children are what runs.
    """
    backend = host.attention_backend_for(backend, forward_mode)
    return is_ours(backend) and bool(backend.fuses_qk_norm_rope)


def takes_rotated_apart(backend: Any, forward_mode: Any) -> bool:
    """Return whether ``backend`` wants MLA's rotated columns as ``q_rope`` and ``k_rope``, beside q and k without them.

    SGLang has MLA backends of both kinds (FA3 and FlashInfer want them apart, Triton and FlashMLA do not); which kind
    one is can be read off its methods. Ours takes both, and is spared putting them together.
    """
    backend = host.attention_backend_for(backend, forward_mode)
    return not is_ours(backend) and _has_q_rope(backend.__class__)


@functools.cache  # asked by every layer of every step
def _has_q_rope(kind: Any) -> bool:
    methods = [vars(base).get("forward_decode") for base in kind.__mro__]
    method = next(method for method in methods if method is not None)
    return "q_rope" in inspect.signature(method).parameters


@functools.cache
def _our_class() -> Any:
    from atom_plugin.attention.backend import AtomAttentionBackend  # which imports SGLang's

    return AtomAttentionBackend
