"""Everything that we do not serve, found before weights load, all reasons at once."""

from __future__ import annotations

import json
from typing import Any

from atom_plugin import device, host, platform, settings, speculation
from atom_plugin.attention.kv_layout import pool_dtype_of
from atom_plugin.attention.limits import LayerOutline, latent_outlines, why_no_row, why_not_backend
from atom_plugin.attention.tables import LayerProblems
from atom_plugin.checkpoint_files import checkpoint_problems, folder_of
from atom_plugin.configs import ConfigError, ServedSpec, load_served_spec, raw_config
from atom_plugin.flags import BACKEND, EITHER, MODEL, Flag, flag_problems
from atom_plugin.layers.rope import why_not_rope
from atom_plugin.model_limits import method_of, parallel_problems, storage_problems
from atom_plugin.register import NAME, LaunchRefused
from atom_plugin.resolve import class_of

FLAGS: tuple[Flag, ...] = (
    Flag(field="speculative_algorithm", served=speculation.SERVED, parts=EITHER, why="others are not tested"),
    Flag(
        field="disaggregation_mode", served=("null",), parts=EITHER, why="disaggregation is not tested end to end yet"
    ),
    Flag(field="dcp_size", served=(1,), parts=EITHER, why="a request's KV cache is on one rank"),
    Flag(field="attn_cp_size", served=(1,), parts=EITHER, why="a request's queries are on one rank"),
    Flag(field="enable_deterministic_inference", served=(False,), parts=EITHER, why="batch invariance is not tested"),
    Flag(field="enable_two_batch_overlap", served=(False,), parts=EITHER, why="two batches would share one metadata"),
    Flag(field="enable_pdmux", served=(False,), parts=EITHER, why="it runs one backend object on several streams"),
    Flag(field="dllm_algorithm", served=(None,), parts=EITHER, why="diffusion decoding is not causal"),
    Flag(field="enable_hisparse", served=(False,), parts=EITHER, why="sparse KV selection is not built"),
    Flag(field="quantization_param_path", served=(None,), parts=EITHER, why="KV scales come with the checkpoint"),
    Flag(field="enable_unified_memory", served=(False,), parts=BACKEND, why="its KV slots are not plain token slots"),
    Flag(field="prefill_only_disable_kv_cache", served=(False,), parts=BACKEND, why="keys are read from the cache"),
    Flag(field="enable_return_routed_experts", served=(False,), parts=MODEL, why="routing is not recorded"),
    Flag(field="modelopt_quant", served=(None,), parts=MODEL, why="it builds the model with transformers, not ours"),
    Flag(field="rl_quant_profile", served=(None,), parts=MODEL, why="weights are served as they are stored"),
    Flag(field="modelopt_checkpoint_restore_path", served=(None,), parts=MODEL, why="ModelOpt builds its own model"),
    Flag(field="offload_group_size", served=(-1,), parts=MODEL, why="offloading is not tested on our modules"),
    Flag(field="ep_dispatch_algorithm", served=(None,), parts=MODEL, why="experts stay where they are numbered"),
    Flag(field="enable_layernorm_sp", served=(False,), parts=MODEL, why="norms are not sequence parallel"),
    Flag(field="enable_dense_mlp_attn_tp", served=(False,), parts=MODEL, why="dense layers use the whole TP group"),
    Flag(field="enable_attn_tp_input_scattered", served=(False,), parts=MODEL, why="inputs are whole on every rank"),
    Flag(field="enable_lean_attention", served=(None, False), parts=EITHER, why="it is an option of SGLang's backends"),
    Flag(field="load_format", served=("auto", "safetensors", "dummy"), parts=MODEL, why="others are not tested"),
    Flag(field="custom_weight_loader", served=(None, []), parts=MODEL, why="weights are checked by our table"),
    Flag(field="pp_size", served=(1,), parts=MODEL, why="the models are not split into pipeline stages"),
    Flag(field="moe_dp_size", served=(1,), parts=MODEL, why="experts are split over the TP group only"),
    Flag(field="moe_a2a_backend", served=("none",), parts=MODEL, why="tokens reach experts by gather and all-reduce"),
    Flag(field="enable_eplb", served=(False,), parts=MODEL, why="experts stay where the checkpoint numbers them"),
    Flag(field="ep_num_redundant_experts", served=(0,), parts=MODEL, why="no expert is held twice"),
    Flag(field="init_expert_location", served=("trivial",), parts=MODEL, why="experts stay where they are numbered"),
    Flag(field="expert_distribution_recorder_mode", served=(None,), parts=MODEL, why="routing is not recorded"),
    Flag(field="elastic_ep_backend", served=(None,), parts=MODEL, why="the expert ranks are fixed at launch"),
    Flag(field="enable_single_batch_overlap", served=(False,), parts=MODEL, why="needs SGLang's own MoE block"),
    Flag(field="enable_dp_lm_head", served=(False,), parts=MODEL, why="it is not tested on our head"),
    Flag(field="moe_dense_tp_size", served=(None,), parts=MODEL, why="dense layers are split over the whole TP group"),
    Flag(field="enable_lora", served=(None, False), parts=MODEL, why="LoRA is not tested on our modules"),
    Flag(field="lora_paths", served=(None, [], {}), parts=MODEL, why="LoRA is not tested on our modules"),
    Flag(field="kt_weight_path", served=(None,), parts=MODEL, why="KTransformers experts are not built"),
    Flag(field="cpu_offload_gb", served=(0,), parts=MODEL, why="offloading is not tested on our modules"),
    Flag(field="enable_torch_compile", served=(False,), parts=MODEL, why="compilation is not tested on our modules"),
    Flag(field="enable_multimodal", served=(None, False), parts=MODEL, why="the models read text and nothing else"),
    Flag(field="is_embedding", served=(False,), parts=MODEL, why="the models end in a language-model head"),
    Flag(field="use_ray", served=(False,), parts=MODEL, why="Ray workers do not load SGLang's plugins"),
    Flag(field="rl_on_policy_target", served=(None,), parts=MODEL, why="needs SGLang's own layers bit for bit"),
)


def refuse_launch(server_args: Any) -> None:
    """Raise LaunchRefused with every reason against this launch; return when there is none.

    ``server_args`` is SGLang's, resolved. Called only for a launch that asks for atom.
    """
    asked = host.asks_for(server_args, NAME)
    cfg = host.resolved(server_args)
    uses_model, uses_backend = cfg.model_impl == NAME, any("backend" in flag for flag in asked)
    parts = [part for part, used in (("model", uses_model), ("backend", uses_backend)) if used]
    reasons = flag_problems(FLAGS, cfg, parts) + setting_problems()
    reasons += speculation.speculation_problems(server_args, parts)
    if uses_model:
        reasons += model_problems(server_args)
    if uses_backend:
        reasons += backend_problems(server_args)
    reasons += platform.why_not_device(cfg.device)
    if reasons:
        lines = "\n".join(f"  - {reason}" for reason in dict.fromkeys(reasons))
        raise LaunchRefused(
            f"atom-plugin cannot serve this launch ({', '.join(asked)}; model {cfg.model_path}):\n{lines}\n"
            f"Nothing was loaded. Change what is named above, or drop {' and '.join(asked)} to use SGLang's own."
        )


def setting_problems() -> list[str]:
    """Return a reason for each environment variable of ours that is malformed."""
    problems = []
    for setting in settings.ALL:
        try:
            setting.get()
        except ValueError as error:
            problems.append(str(error))
    return problems


def model_problems(server_args: Any) -> list[str]:
    """Return the reasons against our model classes: architecture, config, quantisation, sizes, checkpoint files."""
    cfg = host.resolved(server_args)
    model_config = host.model_config(server_args)
    try:
        model_class, _ = class_of(model_config.hf_config)
        source, raw = raw_config(cfg.model_path, cfg.revision)
        overrides = json.loads(cfg.json_model_override_args)
        stated = load_served_spec(raw, source=source, overrides=overrides)
        spec = load_served_spec(model_config)
    except ConfigError as error:
        return [str(error)]
    in_file, in_use = vars(stated), vars(spec)
    problems = [
        f"{source}: {name} is {in_file[name]!r} in the file and {in_use[name]!r} in SGLang's config object"
        for name in in_use
        if name != "max_position_embeddings" and in_file[name] != in_use[name]  # --context-length writes that one
    ]
    problems += why_not_rope(spec.rope) + quantization_problems(cfg, spec) + size_problems(server_args, spec)
    folder = folder_of(cfg.model_path, cfg.revision)
    if cfg.load_format != "dummy" and folder is not None:
        problems += checkpoint_problems(folder, model_class.checkpoint_table(spec))
    return problems


def quantization_problems(cfg: Any, spec: ServedSpec) -> list[str]:
    """Return the reasons against the quantisation of this launch."""
    own, stored = method_of(spec)
    if cfg.quantization not in (None, own):
        return [f"--quantization {cfg.quantization}: the checkpoint is {own or stored} and is served as it is"]
    return storage_problems(spec, device.arch())


def size_problems(server_args: Any, spec: ServedSpec) -> list[str]:
    """Return the reasons against the parallel sizes of this launch."""
    cfg = host.resolved(server_args)
    attention_tp = cfg.tp_size // host.attention_dp_size(server_args)
    return parallel_problems(spec, tp=cfg.tp_size, ep=cfg.ep_size, attention_tp=attention_tp)


def backend_problems(server_args: Any) -> list[str]:
    """Return the reasons against our attention backend, those of every kernel row included."""
    cfg = host.resolved(server_args)
    model_config = host.model_config(server_args)
    problems = why_not_backend(
        kv_cache_dtype=cfg.kv_cache_dtype,
        page_size=cfg.page_size,
        is_sparse=host.is_sparse(model_config),
        is_encoder_decoder=model_config.is_encoder_decoder,
        is_hybrid_swa=model_config.is_hybrid_swa and not cfg.disable_hybrid_swa_memory,
    )
    if problems:
        return problems
    attention_tp = cfg.tp_size // host.attention_dp_size(server_args)
    heads = max(1, model_config.num_attention_heads // attention_tp)
    is_latent = host.uses_mla(model_config)
    if is_latent:
        outlines = latent_outlines(
            heads=heads,
            kv_lora_rank=model_config.kv_lora_rank,
            rope_dim=model_config.qk_rope_head_dim,
            unabsorbed=host.unabsorbed_head_dims(model_config),
            ours=cfg.model_impl == NAME,
        )
    else:
        kv_heads = model_config.get_num_kv_heads(attention_tp)
        outlines = [
            LayerOutline(
                tp_q_head_num=heads,
                tp_k_head_num=kv_heads,
                qk_head_dim=model_config.head_dim,
                v_head_dim=model_config.v_head_dim,
                fused=cfg.model_impl == NAME,
            )
        ]
    captures = device.is_accelerator(device.arch()) and not cfg.disable_cuda_graph
    for outline in outlines:
        layer = LayerProblems(
            layer=outline,
            arch=device.arch(),
            q_dtype=model_config.dtype,
            pool_dtype=pool_dtype_of(cfg.kv_cache_dtype, model_config.dtype, fnuz=device.fp8_is_fnuz()),
            page_size=cfg.page_size,
            kv_lora_rank=model_config.kv_lora_rank if is_latent else None,
        )
        problems += why_no_row(layer, captures=captures, verify_len=cfg.speculative_num_draft_tokens)
    return problems
