"""SGLang's attention backend ``atom``: metadata once a step, then norm, rope, store and attention a layer."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from atom_plugin import device, host, settings
from atom_plugin.attention import mla
from atom_plugin.attention.call import Call, Rope, first, output
from atom_plugin.attention.kv_layout import as_pages, latent_pool_bytes, why_not_pool
from atom_plugin.attention.limits import why_not_latent_layer, why_not_layer
from atom_plugin.attention.metadata import DecodeMetadata, ExtendMetadata, IdleMetadata, Metadata, MetadataBuilder
from atom_plugin.attention.tables import AttendKey, LayerKernels, LayerProblems
from atom_plugin.register import NAME

logger = logging.getLogger(__name__)
#: K and V of one layer as the pool holds them, [pages, page size, KV heads, head dim] each.
Pages = tuple[torch.Tensor, torch.Tensor]
#: What attention returns: [tokens, query heads, v head dim], and the lse [tokens, query heads] if asked for.
Attended = tuple[torch.Tensor, torch.Tensor | None]


class AtomAttentionBackend(AttentionBackend):
    """Dense attention (MHA, GQA, MQA) over SGLang's KV pool, or MLA over its pool of latent rows.

    SGLang owns the pool and its slots. Raises ValueError at construction for a pool or a layer that it cannot serve,
    and NoKernelError when no row of a dispatch table runs a layer of the model.
    """

    needs_cpu_seq_lens = True  # the length of the page tables comes from there, to wait for no accelerator

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.max_context_len: int = runner.model_config.context_len
        self.page_size: int = runner.page_size
        self.fuses_qk_norm_rope: bool = settings.FUSE_QK_NORM_ROPE.get()
        self._q_dtype: torch.dtype = runner.dtype
        _refuse(why_not_pool(self.token_to_kv_pool))
        inner = host.full_attention_pool(self.token_to_kv_pool)
        self.kv_cache_dtype = self.data_type = inner.dtype
        is_latent = host.is_plain_mla_pool(inner)
        self._kv_lora_rank: int | None = inner.kv_lora_rank if is_latent else None
        self._pool_bytes = latent_pool_bytes(inner) if is_latent else 0
        self.forward_metadata: Metadata = IdleMetadata()
        self._builder = MetadataBuilder(req_to_token=self.req_to_token_pool.req_to_token, page_size=self.page_size)
        self._kernels: dict[Any, LayerKernels] = {}
        self._has_sinks = host.has_sinks(runner.model)
        self._verify_len = host.verify_len() if is_latent else None
        layers = host.attention_layers(runner.model)
        for layer in layers:
            self._kernels_of(layer)
        if is_latent:
            _refuse(mla.why_not_pairs(layers, [self._kernels[layer].kind for layer in layers], self.kv_cache_dtype))
            host.register_mla_forward_methods(NAME)
        self._resolve(captured=False)

    # Metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Build the metadata of a batch that runs once."""
        self.forward_metadata = self._builder.build(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Build the metadata of a batch to capture, or refill what a captured graph reads before its replay."""
        build = self._builder.capture if in_capture else self._builder.replay
        self.forward_metadata = build(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured batches of up to ``max_bs`` requests read, and choose their kernels."""
        self._builder.allocate_for_graphs(max_bs)
        self._resolve(captured=True)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of padded requests: they see the one key of SGLang's dump slot 0."""
        return 1

    def shared_read_ends(self, fm: Any) -> Any:
        """Declare that decode and verify read nothing of the scheduler's after the metadata is built."""
        if fm.is_decode() or fm.is_target_verify():
            return host.reads_end_before_replay()
        return super().shared_read_ends(fm)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: no metadata of ours depends on the draft's tokens, as a chain's mask is causal."""

    # Attention

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        cos_sin_cache: torch.Tensor | None = None,
        is_neox: bool | None = None,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        return_lse: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> Any:
        """Attend one new token a request.

        ``q``: [tokens, query heads * head dim] or [tokens, query heads, head dim]; ``k``, ``v``: the same for KV heads,
        both None where the layer shares another layer's cache. ``save_kv_cache``: store k and v here; else they are
        stored already. ``cos_sin_cache`` and ``is_neox``: q and k come un-normed and un-rotated, and the layer's
        ``qk_norm_rope`` says how to finish them. ``q_rope`` and ``k_rope``: MLA's rotated columns, where q and k come
        without them. ``sinks``: as in ``ops.paged_attention``. On a pool of latent rows ``v`` is part of ``k``, and is
        not read; see ``attention.mla``.
        Returns [tokens, query heads * v head dim]; with ``return_lse``, here
        or in the batch, ([tokens, query heads, v head dim], float32 natural-log lse [tokens, query heads]).
        """
        call = Call(
            layer=layer, forward_batch=forward_batch, k=k, v=v, stores=save_kv_cache, q_rope=q_rope, k_rope=k_rope,
            rope=Rope.of(cos_sin_cache, is_neox, layer), sinks=sinks,
            return_lse=return_lse or bool(forward_batch.mha_return_lse),
        )  # fmt: skip
        return self._forward(DecodeMetadata, q, call)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        cos_sin_cache: torch.Tensor | None = None,
        is_neox: bool | None = None,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        return_lse: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> Any:
        """Attend any number of new tokens a request, with or without cached ones before; see ``forward_decode``."""
        call = Call(
            layer=layer, forward_batch=forward_batch, k=k, v=v, stores=save_kv_cache, q_rope=q_rope, k_rope=k_rope,
            rope=Rope.of(cos_sin_cache, is_neox, layer), sinks=sinks,
            return_lse=return_lse or bool(forward_batch.mha_return_lse),
        )  # fmt: skip
        return self._forward(ExtendMetadata, q, call)

    def _forward(self, kind: type[DecodeMetadata] | type[ExtendMetadata], q: torch.Tensor, call: Call) -> Any:
        layer = call.layer
        kernels = self._kernels_of(layer)
        if kernels.kind != "absorbed":
            call.refuse(q_rope=call.q_rope is not None, k_rope=call.k_rope is not None)
        if kernels.kind != "dense":
            call.refuse(cos_sin_cache=call.rope is not None, sinks=call.sinks is not None)
        q_THD = mla.queries(q, call)
        metadata = self._planned(kind, q_THD.shape[0], call)
        if isinstance(metadata, IdleMetadata) or (kernels.kind == "unabsorbed" and metadata.num_tokens == 0):
            real_THD, lse_TH = q_THD.new_empty(0, layer.tp_q_head_num, layer.v_head_dim), None
        elif kernels.kind == "dense":
            pages = self._pages(layer)
            real_THD = self._finish_and_store(first(metadata.num_tokens, q_THD), call, pages)
            real_THD, lse_TH = self._attend(
                real_THD, pages, layer, metadata, return_lse=call.return_lse, sinks=call.sinks
            )
        elif kernels.kind == "absorbed":
            real_THD, lse_TH = self._attend_latent(first(metadata.num_tokens, q_THD), call, metadata)
        else:
            real_THD, lse_TH = self._attend_handed_over(q_THD, call, metadata)
        return output(real_THD, lse_TH, num_rows=q_THD.shape[0], return_lse=call.return_lse)

    def _planned(
        self, kind: type[DecodeMetadata] | type[ExtendMetadata], num_rows: int, call: Call
    ) -> DecodeMetadata | ExtendMetadata | IdleMetadata:
        """Return the metadata of this step, or raise ValueError where it is not that of this batch."""
        metadata = self.forward_metadata
        if isinstance(metadata, IdleMetadata) and num_rows == 0:
            return metadata
        if not isinstance(metadata, kind):
            raise ValueError(
                f"attention layer {call.layer.layer_id} runs {kind.__name__.removesuffix('Metadata').lower()}, the "
                f"metadata is that of a {type(metadata).__name__.removesuffix('Metadata').lower()} batch: "
                f"init_forward_metadata was not called for this batch"
            )
        if metadata.num_tokens == num_rows:
            return metadata
        # Where MLP sync pads an extend batch, the rows past the real ones belong to no request.
        is_mlp_padding = kind is ExtendMetadata and host.num_real_tokens(call.forward_batch) == metadata.num_tokens
        if num_rows < metadata.num_tokens or not is_mlp_padding:
            raise ValueError(
                f"attention layer {call.layer.layer_id} got {num_rows} query rows, the metadata was built for "
                f"{metadata.num_tokens} tokens: the batch was changed or padded after init_forward_metadata"
            )
        return metadata

    def _finish_and_store(self, q_THD: torch.Tensor, call: Call, pages: Pages) -> torch.Tensor:
        """Norm, rotate and store what the call leaves to the backend; return q ready for attention."""
        layer, num_tokens = call.layer, q_THD.shape[0]
        if call.rope is None:
            if (call.k is None) != (call.v is None):
                raise ValueError(f"attention layer {layer.layer_id} got one of k and v: both, or neither, are stored")
            if call.stores and call.k is not None and call.v is not None:
                self._store(first(num_tokens, call.k), first(num_tokens, call.v), call, pages)
            return q_THD
        constants = call.constants()
        if not call.stores or call.k is None or call.v is None:
            raise ValueError(
                f"attention layer {layer.layer_id} got cos_sin_cache without k and v to store (save_kv_cache="
                f"{call.stores}): norm and rope belong to the call that stores"
            )
        positions = call.positions(constants, num_tokens)
        kernels = self._kernels_of(layer)
        return kernels.norm_rope_store(constants)(
            q_THD,
            first(num_tokens, call.k).view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            first(num_tokens, call.v).view(-1, layer.tp_v_head_num, layer.v_head_dim),
            *pages,
            call.slots(num_tokens),
            positions=positions,
            axis_of_frequency=constants.axis_of_frequency,
            cos_sin_cache=call.rope.cos_sin_cache,
            is_neox=call.rope.is_neox,
            q_weight=constants.q_weight,
            k_weight=constants.k_weight,
            eps=constants.eps,
            k_scale=kernels.scales.k,
            v_scale=kernels.scales.v,
        )

    def _store(self, k: torch.Tensor, v: torch.Tensor, call: Call, pages: Pages) -> None:
        """Store finished k and v ([tokens, ...]); they keep their values."""
        layer = call.layer
        k_THD = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v_THD = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        slots = call.slots(k_THD.shape[0])
        kernels = self._kernels_of(layer)  # the pool's own writer would divide the caller's k and v in place
        kernels.store(k_THD, v_THD, *pages, slots, k_scale=kernels.scales.k, v_scale=kernels.scales.v)

    def _attend(
        self,
        q_THD: torch.Tensor,
        pages: Pages,
        layer: Any,
        metadata: DecodeMetadata | ExtendMetadata,
        *,
        return_lse: bool,
        sinks: torch.Tensor | None,
    ) -> Attended:
        kernels = self._kernels_of(layer)
        key = AttendKey(
            phase="decode" if isinstance(metadata, DecodeMetadata) else "extend",
            captured=metadata.batch.captured,
            return_lse=return_lse,
            has_sinks=sinks is not None,
        )
        attended: Attended = kernels.attend(key)(
            q_THD,
            *pages,
            metadata.batch,
            scale=layer.scaling,
            k_scale=kernels.scales.k,
            v_scale=kernels.scales.v,
            window=kernels.window,
            logit_cap=layer.logit_cap,
            return_lse=return_lse,
            sinks_H=None if sinks is None else sinks.contiguous(),
        )
        return attended

    def _attend_latent(self, q_THD: torch.Tensor, call: Call, metadata: DecodeMetadata | ExtendMetadata) -> Attended:
        """Store the call's latent rows and attend to those of the pool, absorbed."""
        layer, kernels = call.layer, self._kernels_of(call.layer)
        pages = as_pages(self.token_to_kv_pool.get_key_buffer(layer.layer_id), self.page_size)
        rows_T1D = mla.latent_rows(call, q_THD.shape[0])
        if rows_T1D is not None:
            # One row is key and value at once. Not the pool's own writer: it takes no scale, and costs more launches.
            slots, scale = call.slots(q_THD.shape[0]), kernels.scales.k
            kernels.store(rows_T1D, rows_T1D, pages, pages, slots, k_scale=scale, v_scale=scale)
        key = AttendKey(
            phase="decode" if isinstance(metadata, DecodeMetadata) else "extend",
            captured=metadata.batch.captured,
            return_lse=call.return_lse,
            q_len=metadata.q_len,
        )
        attended: Attended = kernels.attend(key)(
            q_THD,
            pages,
            metadata.batch,
            kv_lora_rank=layer.v_head_dim,
            scale=layer.scaling,
            kv_scale=kernels.scales.k,
            return_lse=call.return_lse,
        )
        return attended

    def _attend_handed_over(
        self, q_THD: torch.Tensor, call: Call, metadata: DecodeMetadata | ExtendMetadata
    ) -> Attended:
        """Attend to the keys and values of the call, un-absorbed; the pool is neither read nor written."""
        k_pages, v_pages, seen = mla.handed_over(call, metadata.batch, metadata.num_tokens, q_THD.shape[0])
        key = AttendKey(phase="extend", captured=False, return_lse=call.return_lse, causal=seen.causal)
        kernels = self._kernels_of(call.layer)
        attended: Attended = kernels.attend(key)(
            first(metadata.num_tokens, q_THD),
            k_pages,
            v_pages,
            seen,
            scale=call.layer.scaling,
            k_scale=1.0,
            v_scale=1.0,
            window=kernels.window,
            logit_cap=call.layer.logit_cap,
            return_lse=call.return_lse,
            sinks_H=None,
        )
        return attended

    def _resolve(self, *, captured: bool) -> None:
        for kernels in self._kernels.values():
            kernels.resolve(captured=captured, has_sinks=self._has_sinks, verify_len=self._verify_len)
        self._report_rows()

    def _report_rows(self) -> None:
        """Log which row runs each op, where all layers agree in one line."""
        told = {
            ", ".join(sorted({f"{mode.split()[0]}={row}" for mode, row in kernels.rows.items()}))
            for kernels in self._kernels.values()
        }
        for rows in sorted(told):
            logger.info("The attention backend atom on %s: %s", device.arch(), rows)

    def _pages(self, layer: Any) -> Pages:
        """Return the layer's cache through SGLang's getter, which waits for a HiCache load of this layer."""
        k_SHD, v_SHD = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return as_pages(k_SHD, self.page_size), as_pages(v_SHD, self.page_size)

    def _kernels_of(self, layer: Any) -> LayerKernels:
        """Return the layer's rows; a layer that the model did not show at construction gets them at its first call."""
        if layer not in self._kernels:
            problems = LayerProblems(
                layer=layer,
                arch=device.arch(),
                q_dtype=self._q_dtype,
                pool_dtype=self.kv_cache_dtype,
                page_size=self.page_size,
                kv_lora_rank=self._kv_lora_rank,
                pool_bytes=self._pool_bytes,
            )
            _refuse(why_not_layer(layer) + why_not_latent_layer(problems))
            self._kernels[layer] = LayerKernels(problems)
        return self._kernels[layer]


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ValueError("--attention-backend atom cannot serve this model:\n  " + "\n  ".join(reasons))
