"""The platform class that SGLang instantiates when ``atom_plugin.platform.activate`` has answered."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NoReturn

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from atom_plugin import host, register
from atom_plugin.cpu import threads

logger = logging.getLogger(__name__)

#: Tokens that the KV pool holds at most where the user set no bound; SGLang alone fills most of the machine's RAM.
DEFAULT_MAX_TOTAL_TOKENS = 65_536


class AtomCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch on the host's cores: no Triton, no graphs, gloo between ranks.

    It says OOT and not CPU: SGLang's own CPU paths call sgl_kernel, which the wheel on PyPI does not have for CPUs.
    """

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Refuse a launch that asks for atom without our general plugin, and default what a CPU needs.

        Raises LaunchRefused. Runs in the main process, before anything is started.
        """
        asked = [
            f"--{flag.replace('_', '-')} {value}" for flag, value in _choices(server_args) if value == register.NAME
        ]
        if asked and not register.loaded:
            raise register.LaunchRefused(_missing_general_plugin(asked))
        logger.warning("No accelerator found: SGLang runs on the CPU platform of atom-plugin, in plain PyTorch.")
        threads.give_every_rank_its_cores(num_ranks=host.num_core_groups(server_args))
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
            logger.warning(
                "KV pool bounded to %d tokens; --max-total-tokens sets another bound.", DEFAULT_MAX_TOTAL_TOKENS
            )

    def init_backend(self) -> None:
        """Keep the threads of this rank to its share of the cores; SGLang calls it in each process with a model."""
        threads.limit_threads()

    def get_device(self, device_id: int = 0) -> str:
        """Return ``cpu``, a string: ServerArgs keeps it as its ``device``."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """Return SGLang's PyTorch backend."""
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Return False: there is nothing to pin host memory for."""
        return False

    def get_compile_backend(self, mode: Any = None) -> str:
        """Return "eager": SGLang compiles its routers, and a machine that serves need not have a compiler."""
        return "eager"

    def get_quantization_config(self, quantization: str) -> NoReturn:
        """Raise ValueError: SGLang's quantised layers are GPU kernels, and its PyTorch experts read no scales."""
        raise ValueError(
            f"quantization {quantization!r} cannot be served on a CPU: SGLang's quantised layers are GPU kernels. "
            "Serve an unquantised checkpoint (bf16, fp16 or fp32) here, or this one on a GPU."
        )

    if not host.since("0.5.23"):  # newer ones fall back to these classes by themselves

        def get_mha_kv_pool_cls(self) -> type:
            """Return SGLang's pool for MHA and GQA."""
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_mla_kv_pool_cls(self) -> Callable[..., Any]:
            """Return what makes SGLang's pool for MLA."""
            return _latent_pool

        def get_paged_allocator_cls(self) -> type:
            """Return SGLang's allocator for pages of more than one token."""
            from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

            return PagedTokenToKVPoolAllocator


def _latent_pool(size: int, *, index_head_dim: int | None = None, **how: Any) -> Any:
    """Return SGLang's pool of latent rows; the width of an indexer's keys, None, is no argument of that class."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    if index_head_dim is not None:
        raise ValueError(f"sparse attention (index_head_dim {index_head_dim}) cannot be served on a CPU")
    return MLATokenToKVPool(size, **how)


def _choices(server_args: Any) -> list[tuple[str, str | None]]:
    """Return what can name us; while SGLang still resolves, its own helpers for this are out of reach."""
    return [
        ("model_impl", server_args.model_impl),
        ("attention_backend", server_args.attention_backend),
        ("prefill_attention_backend", server_args.prefill_attention_backend),
        ("decode_attention_backend", server_args.decode_attention_backend),
    ]


def _missing_general_plugin(asked: list[str]) -> str:
    listed = os.environ.get("SGLANG_PLUGINS")
    filtered = listed and register.NAME not in {name.strip() for name in listed.split(",")}
    why = (
        f"SGLANG_PLUGINS={listed} leaves it out: set SGLANG_PLUGINS={listed},{register.NAME}, or unset it"
        if filtered
        else "this program resolves its arguments before SGLang's plugins are loaded: "
        "call sglang.srt.plugins.load_plugins() first"
    )
    return (
        f"{' and '.join(asked)}: the plugin {register.NAME} of atom-plugin is not loaded, so SGLang would serve its "
        f"own model. {why[0].upper()}{why[1:]}."
    )
