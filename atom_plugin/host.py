"""Airlock to SGLang: whatever has another place or shape in one of the supported versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from atom_plugin import settings

SUPPORTED_SGLANG = ">=0.5.17,<0.5.24"
#: Releases that the tests run on, oldest first; the others of the range are held to their names and signatures.
TESTED_SGLANG = ("0.5.17", "0.5.21", "0.5.23")


@functools.cache
def sglang_version() -> str:
    """Return the version of the SGLang that Python finds first."""
    return metadata.version("sglang")


@functools.cache
def since(version: str) -> bool:
    """Return whether the SGLang that is here is ``version`` or newer.

    One that says no version is taken for the newest, so that launches without atom go on; those with atom are refused.
    """
    return not says_version() or Version(sglang_version()) >= Version(version)


def says_version() -> bool:
    """Return whether what the SGLang that is here calls itself is a version by PEP 440."""
    try:
        Version(sglang_version())
    except InvalidVersion:
        return False
    return True


def why_not_version() -> str:
    """Return why the SGLang that is here is outside of the supported range, or "" where it is inside.

    By PEP 440: post-releases and local builds of a supported release are inside. Release candidates and development
    builds are outside, also of a supported release: their number does not say which release's names they have.
    """
    if says_version() and SpecifierSet(SUPPORTED_SGLANG).contains(sglang_version(), prereleases=False):
        return ""
    return f"atom-plugin supports the releases of SGLang {SUPPORTED_SGLANG}, and SGLang {sglang_version()} is installed"


def what_to_do_about_version() -> str:
    """Return the ways out of an unsupported SGLang."""
    if not says_version():
        return f"Install one of them: {settings.ALLOW_SGLANG.name}=1 does not help where there is no version (PEP 440)"
    return f"Install one of them, or set {settings.ALLOW_SGLANG.name}=1 to try this one, untested"


def allowed_all_the_same() -> str:
    """Return what is done about an unsupported SGLang that the user allows."""
    return f"it is served because {settings.ALLOW_SGLANG.name}=1, untested"


def attention_tp_group() -> dict[str, object]:
    """Return the keyword arguments that put one of SGLang's parallel linears on the attention-TP group.

    From 0.5.22 they take the name of a group; before it a rank and a size.
    """
    from sglang.srt.runtime_context import get_parallel

    if since("0.5.22"):
        return {"parallel_group": "attn_tp"}
    return {"tp_rank": get_parallel().attn_tp_rank, "tp_size": get_parallel().attn_tp_size}


def bind_topk(topk: Any, experts: Any) -> None:
    """Tell a TopK layer which MoE runner consumes its output; SGLang before 0.5.23 finds that out by itself."""
    if since("0.5.23"):
        topk.bind_runner_backend(experts.runner_backend, routing_method_type=experts.routing_method_type)


@functools.cache
def _attention_wrappers() -> tuple[Any, Any, Any]:
    """Return SGLang's backends that hold other backends: hybrid (by mode), hybrid linear, two-batch overlap."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.layers.attention.tbo_backend import TboAttnBackend

    return HybridAttnBackend, HybridLinearAttnBackend, TboAttnBackend


def attention_backend_for(backend: Any, forward_mode: Any) -> Any:
    """Return the backend that runs the full-attention layers of a batch in ``forward_mode``, out of its wrappers."""
    by_mode, hybrid_linear, two_batch_overlap = _attention_wrappers()  # asked by every layer: no imports here
    while True:
        if isinstance(backend, by_mode):
            backend = backend._select_backend(forward_mode)
        elif isinstance(backend, hybrid_linear):
            backend = backend.full_attn_backend
        elif isinstance(backend, two_batch_overlap):
            backend = backend.primary
        else:
            return backend


def is_capturing_prefill() -> bool:
    """Return whether a prefill graph is being captured or replayed, in which attention keeps to one form."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.context_manager import (
        is_in_tc_piecewise_cuda_graph,
    )

    return is_in_tc_piecewise_cuda_graph() or is_in_breakable_cuda_graph()


def plan_prefix_chunks(backend: Any, forward_batch: Any) -> None:
    """Let the backend of ``forward_batch`` plan for the prefix chunks that SGLang has cut, where it has to plan."""
    backend = attention_backend_for(backend, forward_batch.forward_mode)
    plan = getattr(backend, "init_mha_chunk_metadata", None)
    if plan is not None:
        plan(forward_batch)


def num_real_tokens(forward_batch: Any) -> int | None:
    """Return how many of the batch's tokens are real where MLP sync padded it; None where nobody counted."""
    if since("0.5.20"):
        return forward_batch.global_num_token_non_padded_cpu
    return forward_batch.num_token_non_padded_cpu


#: The flags that can name us, and whether SGLang resolves them.
NAMING_FLAGS = (
    "model_impl",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)


#: Flags that older supported versions do not have.
FLAGS_SINCE = {"enable_layernorm_sp": "0.5.19", "enable_dense_mlp_attn_tp": "0.5.19", "enable_lean_attention": "0.5.19"}


def raw_flag(server_args: Any, field: str) -> Any:
    """Return what the user gave for ``field``, None also where this SGLang has no such flag."""
    return getattr(server_args, field, None)


def asks_in_so_many_words(server_args: Any, name: str) -> list[str]:
    """Return the flags with which the user names us, before any resolution; needs nothing of SGLang's."""
    return [as_option(field, name) for field in NAMING_FLAGS if raw_flag(server_args, field) == name]


def asks_for(server_args: Any, name: str) -> list[str]:
    """Return the flags of a launch that name us, given or resolved, as a user would write them; or an empty list."""
    cfg = resolved(server_args)
    prefill, decode = attention_backends(server_args)
    flags = {
        "model_impl": cfg.model_impl,
        "speculative_draft_attention_backend": cfg.speculative_draft_attention_backend,
    }
    if prefill == decode:
        flags["attention_backend"] = prefill
    else:
        flags |= {"prefill_attention_backend": prefill, "decode_attention_backend": decode}
    return [as_option(field, name) for field, value in flags.items() if value == name]


def attention_backends(server_args: Any) -> tuple[str, str]:
    """Return the attention backends of prefill and of decode."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    prefill, decode = attention_backends_of(resolved(server_args))
    return prefill, decode


def as_option(field: str, value: Any) -> str:
    """Return a flag as it is written on the command line."""
    return f"--{field.replace('_', '-')} {value}"


def resolved(server_args: Any) -> Any:
    """Return a read-only view of a launch with SGLang's decisions applied over the user's flags."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def model_config(server_args: Any) -> Any:
    """Return SGLang's ModelConfig of a launch, built once."""
    if since("0.5.19"):
        from sglang.srt.arg_groups.model_override_base import model_config_of

        return model_config_of(server_args)
    return server_args.get_model_config()


def attention_dp_size(server_args: Any) -> int:
    """Return over how many ranks attention is data parallel, 1 for none."""
    cfg = resolved(server_args)
    if since("0.5.22"):
        return int(cfg.attn_dp_size)
    return int(cfg.dp_size) if cfg.enable_dp_attention else 1


def stamp_resolution(model_config: Any, architecture: str) -> None:
    """Record what SGLang's own get_model_architecture records beside its return value; later readers rely on it."""
    from sglang.srt.configs.model_config import ModelImpl

    model_config._resolved_model_arch = architecture
    model_config._resolved_model_impl = ModelImpl.SGLANG


def add_attention_backend_choice(name: str) -> None:
    """Let `--attention-backend`, `--prefill-...` and `--decode-attention-backend` take ``name``."""
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if name not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([name])


def register_attention_backend(name: str, make: Callable[[Any], Any]) -> None:
    """Let a scheduler process build ``make(runner)`` for backend ``name``."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.attention_registry import register_attention_backend as register

    if name not in ATTENTION_BACKENDS:
        register(name)(make)


def make_default_attention_backend(name: str, *, model_impl: str) -> None:
    """Make ``name`` the attention backend of launches with ``model_impl`` that name none.

    Up to 0.5.18 a CPU default is there before plugins are asked, which the user cannot have meant where our platform
    serves.
    """
    from sglang.srt.arg_groups.overrides import register_model_override_predicate

    unset = (None,) if since("0.5.19") else (None, "intel_amx")

    def provide(server_args: Any, hf_config: Any) -> dict[str, Any]:
        fills = server_args.model_impl == model_impl and server_args.attention_backend in unset
        return {"attention_backend": name} if fills else {}

    register_model_override_predicate(lambda architecture: True)(provide)


def refuse_tree_verify(spec_info: Any) -> None:
    """Raise ValueError unless the draft that ``spec_info`` verifies is a chain, which causal attention covers."""
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    if isinstance(spec_info, EagleVerifyInput) and spec_info.topk == 1:
        return
    draft = f"topk {spec_info.topk}" if isinstance(spec_info, EagleVerifyInput) else type(spec_info).__name__
    raise ValueError(
        f"the atom attention backend verifies EAGLE chains only: {draft} may be a tree, whose custom_mask it would "
        f"ignore. Use --speculative-eagle-topk 1, or another --attention-backend."
    )


def uses_mla(model_config: Any) -> bool:
    """Return whether SGLang keeps a latent (MLA) cache for a model."""
    from sglang.srt.configs.model_config import AttentionArch

    return bool(model_config.attention_arch == AttentionArch.MLA)


def has_linear_attention(model_config: Any) -> bool:
    """Return whether some layers of a model keep a state instead of keys and values."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def full_attention_pool(pool: Any) -> Any:
    """Return the pool of the full-attention layers: ``pool``, or the one that HybridLinearKVPool keeps for them."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return pool.full_kv_pool if type(pool) is HybridLinearKVPool else pool


def is_plain_mha_pool(pool: Any) -> bool:
    """Return whether ``pool`` is SGLang's own multi-head KV pool, and not a subclass that stores in another way."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return type(pool) is MHATokenToKVPool


def is_plain_mla_pool(pool: Any) -> bool:
    """Return whether ``pool`` is SGLang's own pool of latent rows (MLA), and not a subclass as that of an indexer."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return type(pool) is MLATokenToKVPool


def is_sparse(model_config: Any) -> bool:
    """Return whether a model's attention is DeepSeek's sparse one, whose indexer has a cache of its own."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return bool(is_deepseek_dsa(model_config.hf_config))


def unabsorbed_head_dims(model_config: Any) -> tuple[int, int] | None:
    """Return the head dims of an MLA model's un-absorbed attention: that of queries and keys, and that of values.

    None where SGLang's config object does not state them: it does not for MiniCPM3, which is always absorbed.
    """
    if "qk_nope_head_dim" not in vars(model_config):
        return None
    return model_config.qk_nope_head_dim + model_config.qk_rope_head_dim, model_config.v_head_dim


def verify_len() -> int | None:
    """Return how many tokens of a request speculation verifies at once, None where this process does not speculate."""
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_num_draft_tokens or None


def add_chunked_prefix_cache_backend(name: str) -> None:
    """Let MLA models un-absorb long prefixes in chunks on the attention backend ``name``."""
    from sglang.srt.server_args import (
        CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
        add_chunked_prefix_cache_attention_backend,
    )

    if name not in CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        add_chunked_prefix_cache_attention_backend(name)


def register_mla_forward_methods(name: str) -> None:
    """Tell SGLang's own MLA models which form of attention an extend takes on the attention backend ``name``.

    As on SGLang's fa3: without a prefix, and from its threshold on in chunks, un-absorbed, else absorbed. Unknown
    backends get what it does for Triton, which never takes chunks.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    def choose(attention: Any, forward_batch: Any) -> Any:
        return handlers._handle_attention_backend(attention, forward_batch, name)

    handlers.AttentionBackendRegistry.register(name, choose)


def has_sinks(model: Any) -> bool:
    """Return whether ``model`` hands attention sinks over: SGLang's models that do keep a parameter ``sinks``."""
    return any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters())


def attention_layers(model: Any) -> list[Any]:
    """Return every RadixAttention of ``model``."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def num_core_groups(server_args: Any) -> int:
    """Return how many ``|``-separated groups SGLANG_CPU_OMP_THREADS_BIND must have for a launch on CPUs.

    Up to 0.5.18 the TP ranks of one replica; later all ranks, where only replicas multiply (up to 0.5.21 attention DP
    is ``dp_size`` as well, from 0.5.22 on it has moved out by the time that a platform is asked).
    """
    if not since("0.5.19"):
        return int(server_args.tp_size)
    is_attention_dp = not since("0.5.22") and server_args.enable_dp_attention
    return int((1 if is_attention_dp else server_args.dp_size) * server_args.tp_size * server_args.pp_size)


def reads_end_before_replay() -> Any:
    """Return SGLang's word for a backend that reads nothing of the scheduler's once its metadata is built."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.PRE_REPLAY


def why_backend_is_unknown(name: str) -> list[str]:
    """Return where SGLang does not know the attention backend ``name`` in this process; empty where it does."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    reasons = [] if name in ATTENTION_BACKEND_CHOICES else [f"--attention-backend does not take {name}"]
    return reasons if name in ATTENTION_BACKENDS else [*reasons, f"no scheduler can build the backend {name}"]
