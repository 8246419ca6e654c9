"""latent_norm_rope on a GPU is what reference.py computes on the CPU, in a graph as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atom_plugin.ops.latent_norm_rope import TABLE, latent_norm_rope
from tests.ops.test_latent_norm_rope import SHAPES, make_call

pytestmark = pytest.mark.gpu

TRITON = next(kernel for kernel in TABLE.kernels if kernel.name == "triton")


def on_gpu(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call's tensors on the GPU, with the strides that they had."""
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    for name in ("q_rope_THR", "kv_TD", "out_THR"):
        wide = torch.empty_strided(call[name].shape, call[name].stride(), dtype=call[name].dtype, device="cuda")
        moved[name] = wide.copy_(call[name])
    return moved


@pytest.mark.parametrize("shape", [*SHAPES, (4097, 8, 512, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_place", [False, True])
def test_it_is_the_reference(shape: tuple[int, int, int, int], dtype: torch.dtype, in_place: bool) -> None:
    torch.manual_seed(0)
    call = make_call(*shape, dtype)
    given = on_gpu(call)
    if in_place:
        given["out_THR"] = given["q_rope_THR"]
    expected = latent_norm_rope(**call, forced="reference" if shape[0] < 100 else "eager")
    rows = latent_norm_rope(**given)
    near = {"rtol": TRITON.tolerance[dtype].rtol, "atol": TRITON.tolerance[dtype].atol}
    torch.testing.assert_close(rows.cpu(), expected, **near)
    torch.testing.assert_close(given["out_THR"].cpu(), call["out_THR"], **near)


def test_a_graph_reads_new_positions() -> None:
    torch.manual_seed(0)
    call = make_call(9, 12, 512, 64, torch.bfloat16)
    given = on_gpu(call)
    latent_norm_rope(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = latent_norm_rope(**given)
    call["positions_T"] = call["positions_T"].flip(0) // 2
    given["positions_T"].copy_(call["positions_T"])
    graph.replay()
    expected = latent_norm_rope(**call, forced="reference")
    torch.testing.assert_close(rows.cpu(), expected, rtol=1.6e-2, atol=1e-5)
    torch.testing.assert_close(given["out_THR"].cpu(), call["out_THR"], rtol=1.6e-2, atol=1e-5)
