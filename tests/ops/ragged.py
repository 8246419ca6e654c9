"""What a ragged page table holds, worked out by loops: for the CPU's and the GPU's tests."""

from __future__ import annotations

import torch

from atom_plugin.ops.indices import PageTable
from atom_plugin.ops.ragged import RaggedPages, RaggedSlots


def random_table(seq_lens: list[int], page_size: int, spare: int = 3) -> tuple[torch.Tensor, PageTable]:
    """Return (seq_lens_B, page table); entries past a request's last page are huge, and each row has ``spare`` more."""
    most = max(-(-seq_len // page_size) for seq_len in seq_lens) + spare
    pages = torch.full((len(seq_lens), most + 5), 2**30, dtype=torch.int32)[:, :most]
    for row, seq_len in zip(pages, seq_lens, strict=True):
        row[: -(-seq_len // page_size)] = torch.randint(1, 1000, (-(-seq_len // page_size),), dtype=torch.int32)
    return torch.tensor(seq_lens, dtype=torch.int32), PageTable(pages_BP=pages, page_size=page_size)


def assert_packed(ragged: RaggedPages, seq_lens: list[int], table: PageTable, tail: int) -> None:
    """Assert bounds, pages, last lengths, and ``tail`` entries of page 0 after the last page."""
    pages, size = table.pages_BP.cpu(), table.page_size
    counts = [-(-seq_len // size) for seq_len in seq_lens]
    total = sum(counts)
    assert ragged.indptr_B1.tolist() == [0, *torch.tensor(counts).cumsum(0).tolist()]
    expected = [page for row, count in zip(pages.tolist(), counts, strict=True) for page in row[:count]]
    assert ragged.pages_N[:total].tolist() == expected
    assert ragged.pages_N[total : total + tail].tolist() == [0] * tail
    filled = [index for index, seq_len in enumerate(seq_lens) if seq_len]
    last = ragged.last_lens_B.tolist()
    assert [last[index] for index in filled] == [seq_lens[index] - (counts[index] - 1) * size for index in filled]


def zeroed(out: torch.Tensor, q_lens: list[int], seq_lens: list[int]) -> torch.Tensor:
    """Return ``out`` with zeros where a query sees no key, or belongs to no request."""
    expected, token = out.clone(), 0
    for q_len, seq_len in zip(q_lens, seq_lens, strict=True):
        expected[token : token + max(0, q_len - seq_len)] = 0
        token += q_len
    expected[token:] = 0
    return expected


def assert_slots(ragged: RaggedSlots, seq_lens: list[int], table: PageTable, tail: int) -> None:
    """Assert bounds, the slot of each key, and ``tail`` entries of slot 0 after the last key."""
    size, total = table.page_size, sum(seq_lens)
    assert ragged.indptr_B1.tolist() == [0, *torch.tensor(seq_lens).cumsum(0).tolist()]
    pages = table.pages_BP.tolist()
    expected = [pages[b][at // size] * size + at % size for b, length in enumerate(seq_lens) for at in range(length)]
    assert ragged.slots_N[:total].tolist() == expected
    assert ragged.slots_N[total : total + tail].tolist() == [0] * tail
    assert ragged.ones_B.tolist() == [1] * len(seq_lens)
