"""Which AITER row runs what on an MI300X and an MI355X, and why the others do not: cells and reasons by hand."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

from atom_plugin import aiter_lib
from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops import mla_attention, paged_attention, qk_norm_rope_store_kv, store_kv
from atom_plugin.ops.mla_attention import MlaAttentionProblem
from atom_plugin.ops.paged_attention import NO_WINDOW, PagedAttentionProblem
from atom_plugin.ops.qk_norm_rope_store_kv import QKNormRopeStoreKVProblem
from atom_plugin.ops.store_kv import StoreKVProblem
from tests.aiter.conftest import Install

BF16, FP16, FN, FNUZ = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz
UNIFIED, RAGGED, PREFILL = "aiter_unified_attention", "aiter_paged_attention_ragged", "aiter_mha_batch_prefill"

#: Qwen3-8B on one MI300X, decode, SGLang's page size of 1.
DECODE = PagedAttentionProblem(
    arch="gfx942", phase="decode", captured=True, q_dtype=BF16, kv_dtype=BF16, num_q_heads=32, num_kv_heads=4,
    qk_head_dim=128, v_head_dim=128, page_size=1, window=NO_WINDOW, logit_cap=0.0, return_lse=False, has_sinks=False,
)  # fmt: skip
EXTEND = dataclasses.replace(DECODE, phase="extend", captured=False)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("problem", "changes", "row"),
    [
        (DECODE, {}, RAGGED),
        (DECODE, {"page_size": 16}, UNIFIED),
        (DECODE, {"page_size": 64}, UNIFIED),
        (DECODE, {"page_size": 1024}, UNIFIED),
        (DECODE, {"q_dtype": FP16, "kv_dtype": FP16, "qk_head_dim": 64, "v_head_dim": 64}, RAGGED),
        (DECODE, {"qk_head_dim": 256, "v_head_dim": 256, "num_q_heads": 16, "num_kv_heads": 1}, RAGGED),
        (DECODE, {"logit_cap": 30.0}, RAGGED),
        (DECODE, {"page_size": 16, "window": 128, "has_sinks": True, "num_q_heads": 64, "num_kv_heads": 8}, UNIFIED),
        (DECODE, {"page_size": 16, "qk_head_dim": 80, "v_head_dim": 80}, UNIFIED),
        (EXTEND, {}, PREFILL),
        (EXTEND, {"window": 128, "logit_cap": 30.0, "qk_head_dim": 256, "v_head_dim": 256}, PREFILL),
        (EXTEND, {"page_size": 16}, UNIFIED),
        (EXTEND, {"page_size": 64, "window": 4096}, UNIFIED),
        (EXTEND, {"page_size": 64, "qk_head_dim": 64, "v_head_dim": 64}, UNIFIED),
    ],
)
def test_cells_of_attention_that_main_has_to_serve(
    problem: PagedAttentionProblem, changes: dict[str, Any], row: str, arch: str, captured: bool
) -> None:
    with aiter_lib.assume("main"):
        cell = dataclasses.replace(problem, arch=arch, captured=captured, **changes)
        assert paged_attention.TABLE.choose(cell).name == row


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"page_size": 1}, RAGGED),
        ({"page_size": 64}, UNIFIED),
        ({"phase": "extend", "page_size": 64}, UNIFIED),
    ],
)
@pytest.mark.parametrize(("arch", "float8"), [("gfx942", FNUZ), ("gfx950", FN)])
def test_a_float8_cache_in_the_format_of_the_chip(changes: dict[str, Any], row: str, arch: str, float8: Any) -> None:
    with aiter_lib.assume("main"):
        cell = dataclasses.replace(DECODE, arch=arch, kv_dtype=float8, **changes)
        assert paged_attention.TABLE.choose(cell).name == row


def reasons_of(table: Any, row: str, problem: Any) -> list[str]:
    (kernel,) = [kernel for kernel in table.kernels if kernel.name == row]
    return list(kernel.why_not(problem))


@pytest.mark.parametrize(
    ("row", "problem", "changes", "reason"),
    [
        (UNIFIED, DECODE, {"page_size": 1}, "page size 1: takes powers of two from 16"),
        (UNIFIED, DECODE, {"page_size": 48}, "page size 48: takes powers of two from 16"),
        (UNIFIED, DECODE, {"page_size": 16, "return_lse": True}, "returns no lse"),
        (UNIFIED, EXTEND, {"page_size": 16, "causal": False}, "not causal: called for causal attention only"),
        (UNIFIED, DECODE, {"page_size": 16, "v_head_dim": 64}, "head dim 128 of q and k, 64 of v: takes equal ones"),
        (UNIFIED, DECODE, {"page_size": 16, "num_kv_heads": 5}, "32 query heads do not divide over 5 KV heads"),
        (UNIFIED, DECODE, {"page_size": 16, "qk_head_dim": 8, "v_head_dim": 8}, "head dim 8: takes 16 to 512"),
        (UNIFIED, DECODE, {"page_size": 16, "q_dtype": torch.float32, "kv_dtype": torch.float32},
         "queries of torch.float32: takes bfloat16, float16"),
        (UNIFIED, DECODE, {"page_size": 16, "kv_dtype": FN},
         "KV cache of torch.float8_e4m3fn on gfx942 for these queries: takes bfloat16 or float8_e4m3fnuz"),
        (UNIFIED, DECODE, {"page_size": 16, "kv_dtype": FNUZ, "arch": "gfx950"},
         "KV cache of torch.float8_e4m3fnuz on gfx950 for these queries: takes bfloat16 or float8_e4m3fn"),
        (UNIFIED, DECODE, {"page_size": 16, "arch": "sm90"}, "runs on gfx942 and gfx950, this is sm90"),
        (UNIFIED, DECODE, {"page_size": 16, "arch": "gfx1250"}, "runs on gfx942 and gfx950, this is gfx1250"),
        (UNIFIED, DECODE, {"page_size": 16, "arch": "cpu"},
         "runs on gfx942 and gfx950; on cpu only with TRITON_INTERPRET=1, and forced by name"),
        (RAGGED, DECODE, {"phase": "extend"}, "extend: takes one query a request"),
        (RAGGED, DECODE, {"page_size": 64}, "page size 64 of torch.bfloat16: takes 1, 16, 32"),
        (RAGGED, DECODE, {"page_size": 128, "kv_dtype": FNUZ},
         "page size 128 of torch.float8_e4m3fnuz: takes 1, 16, 32, 64"),
        (RAGGED, DECODE, {"window": 128}, "sliding window 128: takes none"),
        (RAGGED, DECODE, {"has_sinks": True}, "attention sinks: takes none"),
        (RAGGED, DECODE, {"return_lse": True}, "returns no lse"),
        (RAGGED, DECODE, {"num_kv_heads": 1}, "32 query heads a KV head: takes up to 16"),
        (RAGGED, DECODE, {"qk_head_dim": 96, "v_head_dim": 96}, "head dim 96: takes 64, 128, 192, 256"),
        (RAGGED, DECODE, {"arch": "cpu"}, "runs on gfx942 and gfx950, this is cpu"),
        (PREFILL, EXTEND, {"phase": "decode"}, "decode: takes extend"),
        (PREFILL, EXTEND, {"page_size": 64}, "page size 64: takes 1, 16, 1024"),
        (PREFILL, EXTEND, {"qk_head_dim": 64, "v_head_dim": 64}, "head dim 64: takes 128, 256"),
        (PREFILL, EXTEND, {"kv_dtype": FNUZ},
         "KV cache of torch.float8_e4m3fnuz on gfx942 for these queries: takes bfloat16"),
        (PREFILL, EXTEND, {"has_sinks": True}, "attention sinks: main finds no kernel for them (ROCm/aiter #4976)"),
        (PREFILL, EXTEND, {"return_lse": True}, "returns no lse"),
        (PREFILL, EXTEND, {"causal": False}, "not causal: called for causal attention only"),
    ],
)  # fmt: skip
def test_every_reason_of_attention(
    row: str, problem: PagedAttentionProblem, changes: dict[str, Any], reason: str
) -> None:
    with aiter_lib.assume("main"):
        cell = dataclasses.replace(problem, **changes)
        assert reasons_of(paged_attention.TABLE, row, cell) == [reason]
        with pytest.raises(NoKernelError) as error:  # a forced row takes the same checks
            paged_attention.TABLE.choose(dataclasses.replace(cell, forced=row), row)
        assert reason in str(error.value)


STORE = StoreKVProblem(arch="gfx942", kv_dtype=BF16, pool_dtype=BF16)
NORMED = QKNormRopeStoreKVProblem(
    arch="gfx942", qkv_dtype=BF16, pool_dtype=BF16, num_q_heads=32, num_kv_heads=4, head_dim=128, rotary_dim=128,
    num_position_axes=1, normed=True,
)  # fmt: skip
STORE_ROW, NORMED_ROW = "aiter_reshape_and_cache_flash", "aiter_fused_qk_norm_rope_cache_pts_quant_shuffle"
PLAIN_ROW = "aiter_fused_qk_rope_reshape_and_cache"
NOT_THE_BYTES = "KV cache of torch.float8_e4m3fnuz: AITER scales in float32, its bytes are not SGLang's writer's"


@pytest.mark.parametrize(
    ("table", "problem", "changes", "row"),
    [
        (store_kv.TABLE, STORE, {}, STORE_ROW),
        (store_kv.TABLE, STORE, {"arch": "gfx950", "kv_dtype": FP16, "pool_dtype": FP16}, STORE_ROW),
        (qk_norm_rope_store_kv.TABLE, NORMED, {}, NORMED_ROW),
        (qk_norm_rope_store_kv.TABLE, NORMED, {"arch": "gfx950", "head_dim": 256, "rotary_dim": 64}, NORMED_ROW),
        (qk_norm_rope_store_kv.TABLE, NORMED, {"normed": False}, PLAIN_ROW),
    ],
)
def test_cells_of_the_writers_that_main_has_to_serve(
    table: Any, problem: Any, changes: dict[str, Any], row: str
) -> None:
    with aiter_lib.assume("main"):
        assert table.choose(dataclasses.replace(problem, **changes)).name == row


@pytest.mark.parametrize(
    ("table", "row", "problem", "changes", "reason"),
    [
        (store_kv.TABLE, STORE_ROW, STORE, {"pool_dtype": FNUZ}, NOT_THE_BYTES),
        (store_kv.TABLE, STORE_ROW, STORE, {"pool_dtype": FP16},
         "KV cache of torch.float16, keys of torch.bfloat16: copies, and does not convert"),
        (store_kv.TABLE, STORE_ROW, STORE, {"arch": "sm90"}, "runs on gfx942 and gfx950, this is sm90"),
        (qk_norm_rope_store_kv.TABLE, NORMED_ROW, NORMED, {"pool_dtype": FNUZ}, NOT_THE_BYTES),
        (qk_norm_rope_store_kv.TABLE, NORMED_ROW, NORMED, {"qkv_dtype": torch.float32, "pool_dtype": torch.float32},
         "q, k and v of torch.float32: takes bfloat16, float16"),
        (qk_norm_rope_store_kv.TABLE, NORMED_ROW, NORMED, {"pool_dtype": FP16},
         "KV cache of torch.float16 for keys of torch.bfloat16: takes equal ones"),
        (qk_norm_rope_store_kv.TABLE, NORMED_ROW, NORMED, {"num_position_axes": 3}, "3 position axes: takes 1"),
        (qk_norm_rope_store_kv.TABLE, NORMED_ROW, NORMED, {"normed": False}, "no q/k norm: it always norms"),
        (qk_norm_rope_store_kv.TABLE, NORMED_ROW, NORMED, {"head_dim": 80, "rotary_dim": 80},
         "head dim 80: takes 64, 128, 256"),
        (qk_norm_rope_store_kv.TABLE, NORMED_ROW, NORMED, {"rotary_dim": 20},
         "rotary dim 20 of head dim 128: takes multiples of 8 up to it"),
        (qk_norm_rope_store_kv.TABLE, PLAIN_ROW, NORMED, {}, "q/k norm: it does none"),
        (qk_norm_rope_store_kv.TABLE, PLAIN_ROW, NORMED, {"normed": False, "rotary_dim": 64},
         "rotary dim 64 of head dim 128: rotates whole heads"),
        (qk_norm_rope_store_kv.TABLE, PLAIN_ROW, NORMED, {"normed": False, "head_dim": 96, "rotary_dim": 96},
         "head dim 96: takes powers of two from 16"),
        (qk_norm_rope_store_kv.TABLE, PLAIN_ROW, NORMED, {"normed": False, "qkv_dtype": FP16, "pool_dtype": FP16},
         "q, k and v of torch.float16: takes bfloat16"),
    ],
)  # fmt: skip
def test_every_reason_of_the_writers(table: Any, row: str, problem: Any, changes: dict[str, Any], reason: str) -> None:
    with aiter_lib.assume("main"):
        assert reasons_of(table, row, dataclasses.replace(problem, **changes)) == [reason]


#: Kimi-K2 on one of eight MI300X, decode, SGLang's page size of 1.
MLA = MlaAttentionProblem(
    arch="gfx942", phase="decode", captured=True, q_dtype=BF16, kv_dtype=BF16, num_heads=8, kv_lora_rank=512,
    rope_dim=64, page_size=1, max_q_len=1, equal_q_lens=True, pool_bytes=1 << 30, return_lse=False,
)  # fmt: skip

ALL_ROWS = [
    (table, kernel.name, problem)
    for table, problem in (
        (paged_attention.TABLE, DECODE),
        (store_kv.TABLE, STORE),
        (qk_norm_rope_store_kv.TABLE, NORMED),
        (mla_attention.TABLE, MLA),
    )
    for kernel in table.kernels
    if kernel.name.startswith("aiter_")
]


@pytest.mark.parametrize(("table", "row", "problem"), ALL_ROWS, ids=[row for _, row, _ in ALL_ROWS])
def test_without_aiter_every_row_says_so_and_loads_nothing(
    monkeypatch: pytest.MonkeyPatch, table: Any, row: str, problem: Any
) -> None:
    monkeypatch.setattr(aiter_lib, "_package", lambda: None)
    assert "AITER is not installed" in reasons_of(table, row, problem)
    (kernel,) = [kernel for kernel in table.kernels if kernel.name == row]
    with pytest.raises(ImportError, match="AITER is not installed"):
        kernel.load()
    with aiter_lib.assume("main"), pytest.raises(ImportError, match="AITER main is assumed here, not installed"):
        kernel.load()


@pytest.mark.parametrize(
    ("table", "row", "problem", "reason"),
    [
        (qk_norm_rope_store_kv.TABLE, NORMED_ROW, NORMED, f"AITER wheel has no {NORMED_ROW.removeprefix('aiter_')}"),
        (paged_attention.TABLE, PREFILL, dataclasses.replace(EXTEND, page_size=16), "page size 16: takes 1"),
        (paged_attention.TABLE, PREFILL, dataclasses.replace(EXTEND, qk_head_dim=256, v_head_dim=256),
         "head dim 256: takes 128"),
        (paged_attention.TABLE, UNIFIED, dataclasses.replace(DECODE, page_size=16, qk_head_dim=80, v_head_dim=80),
         "head dim 80: AITER wheel takes powers of two"),
    ],
)  # fmt: skip
def test_what_the_wheel_lacks(install: Install, table: Any, row: str, problem: Any, reason: str) -> None:
    with aiter_lib.assume("main"):
        assert reasons_of(table, row, problem) == []
    with aiter_lib.assume("wheel"):
        assert reasons_of(table, row, problem) == [reason]
    install("wheel")
    assert reasons_of(table, row, problem) == [reason]


def test_the_version_is_read_from_the_source(install: Install) -> None:
    install("main")
    assert aiter_lib.version() == "main"
    with aiter_lib.assume("wheel"):
        assert aiter_lib.version() == "wheel"
    assert aiter_lib.version() == "main" and "aiter" not in sys.modules


@pytest.mark.parametrize("version", aiter_lib.VERSIONS)
def test_a_function_that_is_gone_is_refused(install: Install, version: Any) -> None:
    install(version, {"paged_attention_ragged": None})
    assert reasons_of(paged_attention.TABLE, RAGGED, DECODE) == [
        "the installed AITER has no aiter.ops.attention.paged_attention_ragged that this Python can read"
    ]


@pytest.mark.parametrize("version", aiter_lib.VERSIONS)
def test_other_parameters_are_refused(install: Install, version: Any) -> None:
    """One more, renamed, or in another order: a function that we do not know any more."""
    known = aiter_lib.signatures(version)["aiter.ops.attention.paged_attention_ragged"]
    install(version, {"paged_attention_ragged": [*known, "q_scale=None"]})
    (reason,) = reasons_of(paged_attention.TABLE, RAGGED, DECODE)
    assert reason.startswith("the installed AITER's aiter.ops.attention.paged_attention_ragged takes (out, ")
    assert "mtp=1, q_scale=None), known is (" in reason


def test_a_call_that_does_not_fit_the_parameters() -> None:
    with aiter_lib.assume("main"):
        assert aiter_lib.why_not("reshape_and_cache_flash", ("key", "value", "k_descale")) == [
            "AITER main's reshape_and_cache_flash has no parameter k_descale",
            *(
                f"AITER main's reshape_and_cache_flash needs {name}"
                for name in ("key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale")
            ),
        ]


def test_asking_every_row_imports_no_aiter_and_no_triton() -> None:
    program = (
        "import sys\n"
        "from atom_plugin import aiter_lib\n"
        "from tests.aiter.test_reasons import ALL_ROWS, reasons_of\n"
        "sys.modules.pop('triton', None)\n"
        "with aiter_lib.assume('main'):\n"
        "    print([reasons_of(table, row, problem) for table, row, problem in ALL_ROWS])\n"
        "assert not {'aiter', 'triton'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
