"""Every environment variable of the plugin: name, type, default, one sentence. A malformed value raises."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable; ``get`` reads it at the time of the call."""

    name: str
    default: T
    parse: Callable[[str], T]
    accepts: str
    meaning: str

    def get(self) -> T:
        """Return the value in force, or raise ValueError naming the variable, its value and what is accepted."""
        raw = os.environ.get(self.name)
        if raw is None:
            return self.default
        try:
            return self.parse(raw)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{self.name}={raw!r} is not valid: {self.accepts} is accepted ({self.meaning})"
            ) from error


def _flag(raw: str) -> bool:
    return {"0": False, "1": True}[raw]


def _kernel_choices(raw: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in raw.split(",") if item.strip()]
    if any(not equals or not op.strip() or not row.strip() for op, equals, row in pairs):
        raise ValueError(raw)
    choices = {op.strip(): row.strip() for op, _, row in pairs}
    if len(choices) != len(pairs):
        raise ValueError(raw)
    return choices


ALLOW_SGLANG = Setting(
    name="ATOM_PLUGIN_ALLOW_SGLANG",
    default=False,
    parse=_flag,
    accepts="0 or 1",
    meaning="whether an SGLang outside of the supported range is served, with a warning, where it would be refused",
)
FUSE_QK_NORM_ROPE = Setting(
    name="ATOM_PLUGIN_FUSE_QK_NORM_ROPE",
    default=True,
    parse=_flag,
    accepts="0 or 1",
    meaning="whether our models hand q/k norm, rope and the cache write to the attention backend",
)
KERNELS: Setting[dict[str, str]] = Setting(
    name="ATOM_PLUGIN_KERNELS",
    default={},
    parse=_kernel_choices,
    accepts="op=row[,op=row...], each op once, e.g. paged_attention=reference",
    meaning="rows of the dispatch tables that are forced by name; a forced row passes the same checks",
)

ALL: tuple[Setting[bool] | Setting[dict[str, str]], ...] = (ALLOW_SGLANG, FUSE_QK_NORM_ROPE, KERNELS)
