"""The ops that the backend runs and the rows that are forced by name."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from atom_plugin import settings
from atom_plugin.attention.kv_layout import KVScales
from atom_plugin.attention.qk_norm_rope import QKNormRope, declared_by
from atom_plugin.dispatch import Table
from atom_plugin.ops import paged_attention, qk_norm_rope_store_kv, store_kv

PHASES: tuple[Literal["decode", "extend"], ...] = ("decode", "extend")

TABLES: dict[str, Table[Any]] = {
    table.op: table for table in (paged_attention.TABLE, store_kv.TABLE, qk_norm_rope_store_kv.TABLE)
}


def forced_rows() -> dict[str, str]:
    """Return op -> row of ATOM_PLUGIN_KERNELS, or raise ValueError naming the ops, or the rows, that there are."""
    forced = settings.KERNELS.get()
    for op, row in forced.items():
        if op not in TABLES:
            raise ValueError(f"{settings.KERNELS.name} names the op {op!r}; the ops are: {', '.join(TABLES)}")
        if row not in TABLES[op].names():
            raise ValueError(
                f"{settings.KERNELS.name} names the row {op}={row}; its rows are: {', '.join(TABLES[op].names())}"
            )
    return forced


class AttendKey(NamedTuple):
    """What the choice of an attention row depends on besides the launch."""

    phase: Literal["decode", "extend"]
    captured: bool
    return_lse: bool
    has_sinks: bool


class LayerKernels:
    """The rows chosen for one attention layer; a choice is made once and a layer's scales are read once.

    Raises NoKernelError, with every row's reasons, from the constructor where no row runs the layer.
    """

    def __init__(self, layer: Any, *, arch: str, q_dtype: torch.dtype, pool_dtype: torch.dtype, page_size: int) -> None:
        self.scales = KVScales.of(layer, pool_dtype)
        self.window: int = layer.sliding_window_size if layer.sliding_window_size > 0 else paged_attention.NO_WINDOW
        self._layer = layer
        self._arch, self._q_dtype, self._pool_dtype, self._page_size = arch, q_dtype, pool_dtype, page_size
        self._forced = forced_rows()
        self._attend: dict[AttendKey, paged_attention.PagedAttention] = {}
        self.store: store_kv.StoreKV = self._choose(
            store_kv.TABLE, store_kv.StoreKVProblem(arch=arch, kv_dtype=q_dtype, pool_dtype=pool_dtype)
        )
        self._norm_rope_store: qk_norm_rope_store_kv.QKNormRopeStoreKV | None = None

    def resolve(self, *, captured: bool) -> None:
        """Choose every row that the layer can need, so that a missing one ends the launch and not a request."""
        constants = declared_by(self._layer)
        if constants is not None:
            self.norm_rope_store(constants)
        for phase in PHASES:
            for return_lse, has_sinks in itertools.product((False, True), repeat=2):
                self.attend(AttendKey(phase=phase, captured=captured, return_lse=return_lse, has_sinks=has_sinks))

    def attend(self, key: AttendKey) -> paged_attention.PagedAttention:
        """Return the row that attends in ``key``'s phase."""
        if key not in self._attend:
            layer = self._layer
            problem = paged_attention.PagedAttentionProblem(
                arch=self._arch,
                phase=key.phase,
                captured=key.captured,
                q_dtype=self._q_dtype,
                kv_dtype=self._pool_dtype,
                num_q_heads=layer.tp_q_head_num,
                num_kv_heads=layer.tp_k_head_num,
                qk_head_dim=layer.qk_head_dim,
                v_head_dim=layer.v_head_dim,
                page_size=self._page_size,
                window=self.window,
                logit_cap=layer.logit_cap,
                return_lse=key.return_lse,
                has_sinks=key.has_sinks,
            )
            self._attend[key] = self._choose(paged_attention.TABLE, problem)
        return self._attend[key]

    def norm_rope_store(self, constants: QKNormRope) -> qk_norm_rope_store_kv.QKNormRopeStoreKV:
        """Return the row that norms, rotates and stores by what the layer declares."""
        if self._norm_rope_store is None:
            problem = qk_norm_rope_store_kv.QKNormRopeStoreKVProblem(
                arch=self._arch,
                qkv_dtype=self._q_dtype,
                pool_dtype=self._pool_dtype,
                num_q_heads=self._layer.tp_q_head_num,
                num_kv_heads=self._layer.tp_k_head_num,
                head_dim=self._layer.qk_head_dim,
                rotary_dim=constants.rotary_dim,
                num_position_axes=1 if constants.position_source == "positions" else 3,
            )
            self._norm_rope_store = self._choose(qk_norm_rope_store_kv.TABLE, problem)
        return self._norm_rope_store

    def _choose(self, table: Table[Any], problem: Any) -> Any:
        forced = self._forced.get(table.op)
        return table.choose(replace(problem, forced=forced), forced).load()
