"""Packing of page tables and zeroing of blind queries on a GPU, captured and replayed; needs no SGLang."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ops.ragged import assert_packed, assert_slots, random_table, zeroed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("seq_lens", [[1], [40, 33, 1, 0, 16], [9000, 1, 1025], [7] * 2000])
def test_pack(page_size: int, seq_lens: list[int]) -> None:
    from atom_plugin.ops.ragged.kernel import TAIL, pack

    seq_lens_B, table = random_table(seq_lens, page_size)
    table = dataclasses.replace(table, pages_BP=table.pages_BP.cuda())
    assert_packed(pack(seq_lens_B.cuda(), table), seq_lens, table, TAIL)


def test_a_captured_pack_replays_with_other_lengths() -> None:
    from atom_plugin.ops.ragged.kernel import TAIL, pack

    seq_lens_B, table = random_table([500] * 6, 16)
    table, lengths = dataclasses.replace(table, pages_BP=table.pages_BP.cuda()), seq_lens_B.cuda()
    pack(lengths, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ragged = pack(lengths, table)
    for now in ([500] * 6, [1, 17, 500, 16, 33, 1], [1] * 6):
        lengths.copy_(torch.tensor(now))
        for tensor in (ragged.indptr_B1, ragged.pages_N, ragged.last_lens_B):
            tensor.fill_(2**31 - 1)
        graph.replay()
        assert_packed(ragged, now, table, TAIL)


@pytest.mark.parametrize("page_size", [1, 64])
def test_captured_slots_replay_with_other_lengths(page_size: int) -> None:
    from atom_plugin.ops.ragged.kernel import TAIL, pack_slots

    seq_lens_B, table = random_table([3000] * 6, page_size)
    on_host, lengths = table, seq_lens_B.cuda()
    table = dataclasses.replace(table, pages_BP=table.pages_BP.cuda())
    pack_slots(lengths, table, 3000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ragged = pack_slots(lengths, table, 3000)
    for now in ([3000] * 6, [1, 17, 3000, 64, 0, 1], [1] * 6):
        lengths.copy_(torch.tensor(now))
        for tensor in (ragged.indptr_B1, ragged.slots_N, ragged.ones_B):
            tensor.fill_(2**31 - 1)
        graph.replay()
        assert_slots(ragged, now, on_host, TAIL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("q_lens", "seq_lens"), [([4, 4, 2], [1, 9, 0]), ([0, 700], [0, 2]), ([3], [3])])
def test_zero_blind(q_lens: list[int], seq_lens: list[int], dtype: torch.dtype) -> None:
    from atom_plugin.ops.ragged.kernel import zero_blind

    out = torch.full((sum(q_lens) + 3, 32, 128), float("nan"), dtype=dtype)
    out[: sum(q_lens)] = 1
    expected = zeroed(out, q_lens, seq_lens)
    out, bounds = out.cuda(), torch.tensor([0, *torch.tensor(q_lens).cumsum(0)], dtype=torch.int32).cuda()
    zero_blind(out, bounds, torch.tensor(seq_lens, dtype=torch.int32).cuda())
    assert torch.equal(out.cpu(), expected)
