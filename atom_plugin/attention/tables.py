"""The ops of the backend and of our layers, what each kind of layer asks of them, and the rows forced by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from atom_plugin import settings
from atom_plugin.attention.kv_layout import KVScales
from atom_plugin.attention.qk_norm_rope import QKNormRope, declared_by
from atom_plugin.dispatch import Kernel, Table
from atom_plugin.ops import (
    few_token_experts,
    latent_norm_rope,
    mla_attention,
    paged_attention,
    qk_norm_rope_store_kv,
    store_kv,
)

PHASES: tuple[Literal["decode", "extend"], ...] = ("decode", "extend")
#: Queries of a request where a mode sets no bound.
ANY_Q_LEN = 1 << 20

TABLES: dict[str, Table[Any]] = {
    table.op: table
    for table in (
        paged_attention.TABLE,
        mla_attention.TABLE,
        store_kv.TABLE,
        qk_norm_rope_store_kv.TABLE,
        latent_norm_rope.TABLE,
        few_token_experts.TABLE,
    )
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
    """What the choice of an attention row depends on besides the launch.

    ``q_len``: queries of each request, None where they may differ or the op does not ask. ``causal``: False where
    queries attend to a chunk of their prefixes.
    """

    phase: Literal["decode", "extend"]
    captured: bool
    return_lse: bool = False
    has_sinks: bool = False
    q_len: int | None = None
    causal: bool = True


@dataclass(frozen=True, kw_only=True)
class LayerProblems:
    """What one attention layer (a RadixAttention, or the outline of one) asks of each table.

    ``kv_lora_rank``: of a pool of latent rows, None for a pool of keys and values. ``pool_bytes``: of one layer's
    pool, 0 where it is not known yet.
    """

    layer: Any
    arch: str
    q_dtype: torch.dtype
    pool_dtype: torch.dtype
    page_size: int
    kv_lora_rank: int | None = None
    pool_bytes: int = 0

    @property
    def kind(self) -> Literal["dense", "absorbed", "unabsorbed"]:
        """Return what the layer attends to: keys and values of the pool, its latent rows, or what it is handed."""
        if self.kv_lora_rank is None:
            return "dense"
        is_latent = self.layer.tp_k_head_num == 1 and self.layer.v_head_dim == self.kv_lora_rank
        return "absorbed" if is_latent else "unabsorbed"

    @property
    def table(self) -> Table[Any]:
        """Return the table of the layer's attention."""
        return mla_attention.TABLE if self.kind == "absorbed" else paged_attention.TABLE

    @property
    def window(self) -> int:
        """Return how far back a query sees, NO_WINDOW for all the way."""
        size: int = self.layer.sliding_window_size
        return size if size > 0 else paged_attention.NO_WINDOW

    def store(self) -> store_kv.StoreKVProblem:
        """Return the store of finished keys and values, or of latent rows."""
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

    def latent_norm_rope(self) -> latent_norm_rope.LatentNormRopeProblem | None:
        """Return norm and rope of new latent rows where the model does them by this op, as ours does; else None."""
        if self.kv_lora_rank is None or not vars(self.layer).get("norms_latents", False):
            return None
        return latent_norm_rope.LatentNormRopeProblem(
            arch=self.arch,
            dtype=self.q_dtype,
            num_heads=self.layer.tp_q_head_num,
            kv_lora_rank=self.kv_lora_rank,
            rope_dim=self.layer.qk_head_dim - self.kv_lora_rank,
        )

    def attend(self, key: AttendKey) -> paged_attention.PagedAttentionProblem | mla_attention.MlaAttentionProblem:
        """Return the attention of ``key``'s mode, a problem of ``table``."""
        if self.kind == "absorbed":
            return self._attend_latent(key)
        is_handed_over = self.kind == "unabsorbed"
        return paged_attention.PagedAttentionProblem(
            arch=self.arch,
            phase=key.phase,
            captured=key.captured,
            q_dtype=self.q_dtype,
            kv_dtype=self.q_dtype if is_handed_over else self.pool_dtype,
            num_q_heads=self.layer.tp_q_head_num,
            num_kv_heads=self.layer.tp_k_head_num,
            qk_head_dim=self.layer.qk_head_dim,
            v_head_dim=self.layer.v_head_dim,
            page_size=1 if is_handed_over else self.page_size,
            window=self.window,
            logit_cap=self.layer.logit_cap,
            return_lse=key.return_lse,
            has_sinks=key.has_sinks,
            causal=key.causal,
        )

    def _attend_latent(self, key: AttendKey) -> mla_attention.MlaAttentionProblem:
        assert self.kv_lora_rank is not None
        return mla_attention.MlaAttentionProblem(
            arch=self.arch,
            phase=key.phase,
            captured=key.captured,
            q_dtype=self.q_dtype,
            kv_dtype=self.pool_dtype,
            num_heads=self.layer.tp_q_head_num,
            kv_lora_rank=self.kv_lora_rank,
            rope_dim=self.layer.qk_head_dim - self.kv_lora_rank,
            page_size=self.page_size,
            max_q_len=ANY_Q_LEN if key.q_len is None else key.q_len,
            equal_q_lens=key.q_len is not None,
            pool_bytes=self.pool_bytes,
            return_lse=key.return_lse,
        )


Mode = tuple[str, Table[Any], Any, AttendKey | None]


def modes_of(layer: LayerProblems, *, captured: bool, has_sinks: bool, verify_len: int | None = None) -> Iterator[Mode]:
    """Yield (mode, table, problem, key of an attention mode) of every call that a launch can lead to.

    ``has_sinks``: the model hands sinks over. ``verify_len``: tokens of a request that speculation verifies at once,
    None without speculation. Only chunks of prefixes are merged by their lse: what asks for one elsewhere gets its
    rows, or NoKernelError, at its first call.
    """
    if layer.kind != "unabsorbed":
        yield "store_kv", store_kv.TABLE, layer.store(), None
    constants = declared_by(layer.layer)
    if constants is not None:
        yield "qk_norm_rope_store_kv", qk_norm_rope_store_kv.TABLE, layer.norm_rope_store(constants), None
    of_latents = layer.latent_norm_rope()
    if of_latents is not None:
        yield "latent_norm_rope", latent_norm_rope.TABLE, of_latents, None
    for key in _keys_of(layer, captured=captured, has_sinks=has_sinks, verify_len=verify_len):
        yield mode_name(layer.table.op, key), layer.table, layer.attend(key), key


def _keys_of(layer: LayerProblems, *, captured: bool, has_sinks: bool, verify_len: int | None) -> Iterator[AttendKey]:
    if layer.kind == "dense":  # an extend may be a verify, which is captured as well
        for phase in PHASES:
            yield AttendKey(phase=phase, captured=captured, has_sinks=has_sinks)
    elif layer.kind == "absorbed":
        yield AttendKey(phase="decode", captured=captured, q_len=1)
        if verify_len is not None:
            yield AttendKey(phase="extend", captured=captured, q_len=verify_len)
        if not captured:
            yield AttendKey(phase="extend", captured=False)
    elif not captured:
        yield AttendKey(phase="extend", captured=False)
        yield AttendKey(phase="extend", captured=False, return_lse=True)
        yield AttendKey(phase="extend", captured=False, return_lse=True, causal=False)


def mode_name(op: str, key: AttendKey) -> str:
    """Return the mode in words."""
    is_verify = key.phase == "extend" and key.q_len is not None
    words = [op, f"verify of {key.q_len}" if is_verify else key.phase if key.causal else "chunk of prefixes"]
    options = [name for name, asked in (("lse", key.return_lse), ("sinks", key.has_sinks)) if asked]
    return " ".join([*words, *(["in a graph"] if key.captured else []), *options])


def choose(table: Table[Any], problem: Any, forced: dict[str, str]) -> Kernel[Any]:
    """Return the row that runs ``problem``, that of ``forced`` (op -> row) where it names one; else NoKernelError."""
    name = forced.get(table.op)
    return table.choose(replace(problem, forced=name), name)


class LayerKernels:
    """The rows chosen for one attention layer; a choice is made once and a layer's scales are read once.

    ``rows``: op and mode -> name of the row. Where no row runs a mode, ``resolve`` raises NoKernelError with every
    row's reasons, and so does whatever asks for the mode first.
    """

    def __init__(self, problems: LayerProblems) -> None:
        self.scales = KVScales.of(problems.layer, problems.pool_dtype)
        self.kind = problems.kind
        self.window = problems.window
        self.rows: dict[str, str] = {}
        self._problems = problems
        self._forced = forced_rows()
        self._attend: dict[AttendKey, Any] = {}
        self._norm_rope_store: qk_norm_rope_store_kv.QKNormRopeStoreKV | None = None

    def resolve(self, *, captured: bool, has_sinks: bool, verify_len: int | None = None) -> None:
        """Choose every row that the launch can lead to, so that a missing one ends it, and not a request."""
        if self.kind != "unabsorbed":
            _ = self.store
        constants = declared_by(self._problems.layer)
        if constants is not None:
            self.norm_rope_store(constants)
        of_latents = self._problems.latent_norm_rope()
        if of_latents is not None:  # which the model runs: here it is logged beside the others
            self._choose(latent_norm_rope.TABLE, of_latents, "latent_norm_rope")
        for _, _, _, key in modes_of(self._problems, captured=captured, has_sinks=has_sinks, verify_len=verify_len):
            if key is not None:
                self.attend(key)

    @functools.cached_property
    def store(self) -> store_kv.StoreKV:
        """The row that stores finished keys and values, or latent rows."""
        row: store_kv.StoreKV = self._choose(store_kv.TABLE, self._problems.store(), "store_kv")
        return row

    def attend(self, key: AttendKey) -> Any:
        """Return the row that attends in ``key``'s mode: an MlaAttention where absorbed, else a PagedAttention."""
        if key not in self._attend:
            table = self._problems.table
            self._attend[key] = self._choose(table, self._problems.attend(key), mode_name(table.op, key))
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
