"""The ops that the backend runs and the rows that are forced by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from atom_plugin import settings
from atom_plugin.attention.kv_layout import KVScales
from atom_plugin.attention.qk_norm_rope import QKNormRope, declared_by
from atom_plugin.dispatch import Kernel, Table
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


@dataclass(frozen=True, kw_only=True)
class LayerProblems:
    """What one attention layer (a RadixAttention, or the outline of one) asks of each table."""

    layer: Any
    arch: str
    q_dtype: torch.dtype
    pool_dtype: torch.dtype
    page_size: int

    @property
    def window(self) -> int:
        """Return how far back a query sees, NO_WINDOW for all the way."""
        size: int = self.layer.sliding_window_size
        return size if size > 0 else paged_attention.NO_WINDOW

    def store(self) -> store_kv.StoreKVProblem:
        """Return the store of finished keys and values."""
        return store_kv.StoreKVProblem(arch=self.arch, kv_dtype=self.q_dtype, pool_dtype=self.pool_dtype)

    def norm_rope_store(self, constants: QKNormRope) -> qk_norm_rope_store_kv.QKNormRopeStoreKVProblem:
        """Return norm, rope and store by what the layer declares."""
        return qk_norm_rope_store_kv.QKNormRopeStoreKVProblem(
            arch=self.arch,
            qkv_dtype=self.q_dtype,
            pool_dtype=self.pool_dtype,
            num_q_heads=self.layer.tp_q_head_num,
            num_kv_heads=self.layer.tp_k_head_num,
            head_dim=self.layer.qk_head_dim,
            rotary_dim=constants.rotary_dim,
            num_position_axes=1 if constants.position_source == "positions" else 3,
            normed=constants.q_weight is not None,
        )

    def attend(self, key: AttendKey) -> paged_attention.PagedAttentionProblem:
        """Return the attention of ``key``'s mode."""
        return paged_attention.PagedAttentionProblem(
            arch=self.arch,
            phase=key.phase,
            captured=key.captured,
            q_dtype=self.q_dtype,
            kv_dtype=self.pool_dtype,
            num_q_heads=self.layer.tp_q_head_num,
            num_kv_heads=self.layer.tp_k_head_num,
            qk_head_dim=self.layer.qk_head_dim,
            v_head_dim=self.layer.v_head_dim,
            page_size=self.page_size,
            window=self.window,
            logit_cap=self.layer.logit_cap,
            return_lse=key.return_lse,
            has_sinks=key.has_sinks,
        )


def modes_of(
    layer: LayerProblems, *, captured: bool, has_sinks: bool
) -> Iterator[tuple[str, Table[Any], Any, AttendKey | None]]:
    """Yield (mode, table, problem, key of an attention mode) of every call that a launch can lead to.

    ``has_sinks``: the model hands sinks over. No model of ours, and none on a plain KV pool, asks for an lse: one that
    does gets its rows, or NoKernelError, at its first call.
    """
    yield "store_kv", store_kv.TABLE, layer.store(), None
    constants = declared_by(layer.layer)
    if constants is not None:
        yield "qk_norm_rope_store_kv", qk_norm_rope_store_kv.TABLE, layer.norm_rope_store(constants), None
    for phase in PHASES:
        key = AttendKey(phase=phase, captured=captured, return_lse=False, has_sinks=has_sinks)
        yield mode_name(key), paged_attention.TABLE, layer.attend(key), key


def mode_name(key: AttendKey) -> str:
    """Return the mode in words."""
    options = [name for name, asked in (("lse", key.return_lse), ("sinks", key.has_sinks)) if asked]
    return " ".join(["paged_attention", key.phase, *(["in a graph"] if key.captured else []), *options])


def choose(table: Table[Any], problem: Any, forced: dict[str, str]) -> Kernel[Any]:
    """Return the row that runs ``problem``, that of ``forced`` (op -> row) where it names one; else NoKernelError."""
    name = forced.get(table.op)
    return table.choose(replace(problem, forced=name), name)


class LayerKernels:
    """The rows chosen for one attention layer; a choice is made once and a layer's scales are read once.

    ``rows``: op and mode -> name of the row. Raises NoKernelError, with every row's reasons, from the constructor where
    no row runs the layer.
    """

    def __init__(self, layer: Any, *, arch: str, q_dtype: torch.dtype, pool_dtype: torch.dtype, page_size: int) -> None:
        self.scales = KVScales.of(layer, pool_dtype)
        self.rows: dict[str, str] = {}
        self._problems = LayerProblems(
            layer=layer, arch=arch, q_dtype=q_dtype, pool_dtype=pool_dtype, page_size=page_size
        )
        self.window = self._problems.window
        self._forced = forced_rows()
        self._attend: dict[AttendKey, paged_attention.PagedAttention] = {}
        self.store: store_kv.StoreKV = self._choose(store_kv.TABLE, self._problems.store(), "store_kv")
        self._norm_rope_store: qk_norm_rope_store_kv.QKNormRopeStoreKV | None = None

    def resolve(self, *, captured: bool, has_sinks: bool) -> None:
        """Choose every row that the launch can lead to, so that a missing one ends it, and not a request."""
        constants = declared_by(self._problems.layer)
        if constants is not None:
            self.norm_rope_store(constants)
        for _, _, _, key in modes_of(self._problems, captured=captured, has_sinks=has_sinks):
            if key is not None:
                self.attend(key)

    def attend(self, key: AttendKey) -> paged_attention.PagedAttention:
        """Return the row that attends in ``key``'s mode."""
        if key not in self._attend:
            self._attend[key] = self._choose(paged_attention.TABLE, self._problems.attend(key), mode_name(key))
        return self._attend[key]

    def norm_rope_store(self, constants: QKNormRope) -> qk_norm_rope_store_kv.QKNormRopeStoreKV:
        """Return the row that norms, rotates and stores by what the layer declares."""
        if self._norm_rope_store is None:
            problem = self._problems.norm_rope_store(constants)
            self._norm_rope_store = self._choose(qk_norm_rope_store_kv.TABLE, problem, "qk_norm_rope_store_kv")
        return self._norm_rope_store

    def _choose(self, table: Table[Any], problem: Any, mode: str) -> Any:
        kernel = choose(table, problem, self._forced)
        self.rows[mode] = kernel.name
        return kernel.load()
