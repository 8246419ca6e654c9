"""Ledger rows of the CPU platform; they go in only where SGLang runs on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atom_plugin import hooks, platform
from atom_plugin.cpu import communication, moe
from atom_plugin.hooks import Hook

TRITON = Hook(
    target="sglang.srt.utils.common.support_triton",
    kind="replace",
    hook=lambda backend: False,
    why="a backend that it does not know counts as a Triton one, and the slot table is then written by a Triton kernel",
    upstream="0.5.23 asks the platform (PlatformCapabilities.supports_triton)",
    remove_when="0.5.21 is no longer supported",
    versions="<0.5.23",
)
GROUPS = Hook(
    target="sglang.srt.distributed.parallel_state.init_model_parallel_group",
    kind="around",
    hook=communication.build_group_without_gpu,
    why="TP groups build a PyNccl communicator on every device but NPU and XPU: 'Expected a cuda device, but got: cpu'",
    upstream="0.5.23 asks the platform (PlatformCapabilities.supports_pynccl)",
    remove_when="0.5.21 is no longer supported",
    versions="<0.5.23",
)
EXPERTS = Hook(
    target="sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
    kind="around",
    hook=moe.skip_experts_of_other_ranks,
    why="experts of other EP ranks arrive as id -1, which its scatter rejects; no tokens at all fail in its view",
    upstream="unchanged from 0.5.17 to 0.5.23",
    remove_when="moe_forward_native skips ids of -1 and takes zero tokens",
)
GATHER = Hook(
    target="sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
    kind="replace",
    hook=communication.all_gather_into_tensor,
    why="attention DP gathers through a custom op that is registered for GPUs alone",
    upstream="0.5.21 and later go around it when SGLANG_USE_CPU_ENGINE=1, not for an out-of-tree platform",
    remove_when="the choice is made by the platform, or by the device of the tensor",
)
SCATTER = Hook(
    target="sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatter_tensor",
    kind="replace",
    hook=communication.reduce_scatter_tensor,
    why="SGLang's own models scatter the padded rows of attention DP through a custom op that is registered for GPUs",
    upstream="0.5.21 and later go around it when SGLANG_USE_CPU_ENGINE=1, not for an out-of-tree platform",
    remove_when="the choice is made by the platform, or by the device of the tensor",
)
COPY = Hook(
    target="sglang.kernels.ops.memory.memcpy_triton.memcpy_triton",
    kind="replace",
    hook=communication.copy_rows,
    why="attention DP copies rows with a Triton kernel",
    upstream="0.5.21 and later have a copy in PyTorch, for SGLANG_USE_CPU_ENGINE=1 alone",
    remove_when="the choice is made by the platform, or by the device of the tensor",
)
PINNED = Hook(
    target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
    kind="around",
    hook=communication.prepare_in_pageable_memory,
    why="attention DP pins a small tensor, which PyTorch refuses where there is no accelerator",
    upstream="0.5.21 and later do not pin when SGLANG_USE_CPU_ENGINE=1, but do for an out-of-tree platform",
    remove_when="is_pin_memory_available decides here as it does elsewhere in that file",
)
PADDING = Hook(
    target="sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value",
    kind="replace",
    hook=communication.padded_sequence_length,
    why="attention DP pads requests to a length that the torch_native backend does not state: NotImplementedError",
    upstream="it has get_cpu_graph_seq_len_fill_value, which is asked with SGLANG_USE_CPU_ENGINE=1 alone",
    remove_when="TorchNativeAttnBackend has the method",
)


def _keep_widths(original: Callable[..., Any], model_config: Any, load_config: Any, tp_size: int) -> Any:
    return model_config


UNPADDED = Hook(
    target="sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
    kind="around",
    hook=_keep_widths,
    why="on --device cpu it writes padded widths and head counts into the config (an expert width of 48 becomes 64), "
    "for kernels that this platform does not have; the loaders do not pad, so the checkpoint no longer fits its config",
    upstream="unchanged from 0.5.17 to 0.5.23",
    remove_when="it is asked only where SGLang's CPU kernels serve",
)

ROWS = (UNPADDED, TRITON, GROUPS, EXPERTS, GATHER, SCATTER, COPY, PINNED, PADDING)


def install_cpu_hooks() -> None:
    """Install the rows in this process, or do nothing where SGLang has another platform than ours.

    Raises HookError when one does not take. The DP controller and the detokenizer need none of them.
    """
    if platform.is_active():
        hooks.install(ROWS)
