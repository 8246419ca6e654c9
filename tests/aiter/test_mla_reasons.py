"""Which row runs MLA on an MI300X and an MI355X, and why the others do not: cells and reasons by hand."""

from __future__ import annotations

import dataclasses
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from atom_plugin import aiter_lib
from atom_plugin.dispatch import NoKernelError
from atom_plugin.ops.mla_attention import TABLE, aiter
from tests.aiter.conftest import Install
from tests.aiter.test_reasons import BF16, FN, FNUZ, FP16, MLA, reasons_of

DECODE, GLUON, GROUPED = "aiter_mla_decode_fwd", "aiter_mla_gluon", "aiter_mla_decode_rope"
#: A letter a query length of 1, 2, 4 and 8: D for aiter_mla_decode_fwd, T for our own Triton row.
QUERIES = (1, 2, 4, 8)
CELLS = {
    ("gfx942", BF16): {4: "DDDT", 8: "DDDT", 12: "DDDT", 16: "DDDT", 32: "DTTT", 64: "DTTT", 128: "DDDT"},
    ("gfx942", FNUZ): {4: "DDDT", 8: "DDDT", 12: "DDDT", 16: "DDDT", 32: "DTTT", 64: "DTTT", 128: "DTTT"},
    ("gfx950", BF16): {4: "DDDD", 8: "DDDD", 12: "DDDD", 16: "DDDD", 32: "DDDD", 64: "DDDD", 128: "DDDD"},
    ("gfx950", FN): {4: "DDDT", 8: "DDDT", 12: "DDDT", 16: "DDDT", 32: "DTTT", 64: "DTTT", 128: "DTTT"},
}


def cell(**changes: Any) -> Any:
    queries = changes.get("max_q_len", 1)
    return dataclasses.replace(MLA, **{"phase": "decode" if queries == 1 else "extend", **changes})


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("arch", "kv_dtype"), CELLS)
def test_every_cell(arch: str, kv_dtype: torch.dtype, captured: bool, page_size: int) -> None:
    with aiter_lib.assume("main"):
        for heads, letters in CELLS[arch, kv_dtype].items():
            for queries, letter in zip(QUERIES, letters, strict=True):
                how = {"arch": arch, "kv_dtype": kv_dtype, "captured": captured, "page_size": page_size}
                chosen = TABLE.choose(cell(num_heads=heads, max_q_len=queries, **how)).name
                assert chosen == {"D": DECODE, "T": "triton"}[letter], (heads, queries)


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"arch": "gfx950", "num_heads": 40, "max_q_len": 8}, GLUON),
        ({"arch": "gfx950", "num_heads": 96, "max_q_len": 5}, GLUON),
        ({"arch": "gfx950", "num_heads": 12, "max_q_len": 9}, "triton"),
        ({"arch": "gfx950", "num_heads": 100, "max_q_len": 5}, "triton"),
        ({"arch": "gfx950", "pool_bytes": 5 << 30}, DECODE),
        ({"arch": "gfx942", "pool_bytes": 5 << 30}, "triton"),
        ({"arch": "gfx950", "kv_dtype": FN, "pool_bytes": 5 << 30}, "triton"),
        ({"return_lse": True}, DECODE),
        ({"return_lse": True, "num_heads": 32}, "triton"),
        ({"return_lse": True, "kv_dtype": FNUZ}, "triton"),
        ({"return_lse": True, "num_heads": 32, "arch": "gfx950"}, DECODE),
        ({"equal_q_lens": False, "max_q_len": 4}, "triton"),
        ({"q_dtype": FP16, "kv_dtype": FP16}, GROUPED),
        ({"q_dtype": FP16, "kv_dtype": FP16, "max_q_len": 2}, "triton"),
        ({"q_dtype": FP16, "kv_dtype": FP16, "captured": False}, "triton"),
        ({"q_dtype": FP16, "kv_dtype": FP16, "return_lse": True}, "triton"),
        ({"kv_lora_rank": 256, "rope_dim": 32}, GROUPED),
        ({"kv_lora_rank": 512, "rope_dim": 0}, "triton"),
        ({"max_q_len": 4096, "captured": False}, "triton"),
        ({"num_heads": 144}, GROUPED),
        ({"num_heads": 144, "kv_dtype": FNUZ}, "triton"),
    ],
)
def test_cells_beside_them(changes: dict[str, Any], row: str) -> None:
    with aiter_lib.assume("main"):
        assert TABLE.choose(cell(**changes)).name == row


@pytest.mark.parametrize(("arch", "float8"), [("gfx942", FNUZ), ("gfx950", FN)])
@pytest.mark.parametrize("heads", [9, 12, 15, 16])
def test_the_call_that_crashed_others_goes_to_our_own_kernel(arch: str, float8: Any, heads: int) -> None:
    """Queries in bfloat16, cache in float8, 12 heads padded to 16, 8 queries a request; and by name it is refused."""
    crash = cell(arch=arch, kv_dtype=float8, num_heads=heads, max_q_len=8)
    with aiter_lib.assume("main"):
        assert TABLE.choose(crash).name == "triton"
        with pytest.raises(NoKernelError, match=r"8 queries a request of .* heads, run as 16, .*: takes up to 4"):
            TABLE.choose(dataclasses.replace(crash, forced=DECODE), DECODE)


@pytest.mark.parametrize(("arch", "float8"), [("gfx942", FNUZ), ("gfx950", FN)])
def test_queries_in_float8_are_refused_with_every_row_s_reasons(arch: str, float8: Any) -> None:
    with aiter_lib.assume("main"), pytest.raises(NoKernelError) as error:
        TABLE.choose(cell(arch=arch, q_dtype=float8, kv_dtype=float8, num_heads=12))
    message = str(error.value)
    assert all(f"  {name}:\n" in message for name in TABLE.names())
    assert message.count(f"queries of {float8}: takes") == 5


AS_16 = "8 heads, run as 16, on gfx942 with a cache of torch.bfloat16"
AS_32 = "32 heads, run as 32, on gfx942 with a cache of torch.bfloat16"


@pytest.mark.parametrize(
    ("row", "changes", "reason"),
    [
        (DECODE, {"max_q_len": 5}, f"5 queries a request of {AS_16}: takes up to 4"),
        (DECODE, {"max_q_len": 2, "num_heads": 32}, f"2 queries a request of {AS_32}: takes up to 1"),
        (DECODE, {"num_heads": 129}, "129 heads: takes up to 128"),
        (DECODE, {"kv_dtype": FN}, "KV cache of torch.float8_e4m3fn on gfx942: takes bfloat16 or float8_e4m3fnuz"),
        (DECODE, {"kv_dtype": FNUZ, "arch": "gfx950"},
         "KV cache of torch.float8_e4m3fnuz on gfx950: takes bfloat16 or float8_e4m3fn"),
        (DECODE, {"kv_dtype": FP16}, "KV cache of torch.float16 on gfx942: takes bfloat16 or float8_e4m3fnuz"),
        (DECODE, {"q_dtype": FP16}, "queries of torch.float16: takes bfloat16"),
        (DECODE, {"rope_dim": 0}, "latent rows of 512 + 0: takes 512 + 64"),
        (DECODE, {"kv_lora_rank": 256}, "latent rows of 256 + 64: takes 512 + 64"),
        (DECODE, {"equal_q_lens": False},
         "requests with different numbers of queries, or queries of no request: takes equal numbers"),
        (DECODE, {"pool_bytes": (1 << 32) + 1},
         f"a pool of 4294967297 bytes of {AS_16}: takes up to 4294967296, it counts in 32 bits"),
        (DECODE, {"return_lse": True, "max_q_len": 2}, "lse of 2 queries a request: returns it for one"),
        (DECODE, {"return_lse": True, "num_heads": 32}, f"returns no lse of {AS_32}"),
        (DECODE, {"arch": "sm90"}, "runs on gfx942 and gfx950, this is sm90"),
        (DECODE, {"arch": "gfx1250"}, "runs on gfx942 and gfx950, this is gfx1250"),
        (DECODE, {"arch": "cpu"}, "runs on gfx942 and gfx950, this is cpu"),
        (GLUON, {}, "runs on gfx950, this is gfx942"),
        (GLUON, {"arch": "gfx950", "kv_dtype": FN},
         "KV cache of torch.float8_e4m3fn: takes bfloat16, float8 was seen to ruin answers"),
        (GLUON, {"arch": "gfx950", "num_heads": 64}, "64 heads: takes up to 96 but not 64"),
        (GLUON, {"arch": "gfx950", "num_heads": 128}, "128 heads: takes up to 96 but not 64"),
        (GLUON, {"arch": "gfx950", "max_q_len": 9}, "9 queries a request: takes up to 8"),
        (GLUON, {"arch": "gfx950", "return_lse": True, "max_q_len": 3},
         "lse of 3 queries a request: returns it for one"),
        (GLUON, {"arch": "sm90"}, "runs on gfx942 and gfx950, this is sm90"),
        (GROUPED, {"max_q_len": 2}, "takes one query of each request, and none of no request"),
        (GROUPED, {"equal_q_lens": False}, "takes one query of each request, and none of no request"),
        (GROUPED, {"captured": False}, "not captured: AITER builds it anew for each number of requests"),
        (GROUPED, {"kv_dtype": FNUZ},
         "queries of torch.bfloat16, KV cache of torch.float8_e4m3fnuz: takes bfloat16 or float16 of both"),
        (GROUPED, {"q_dtype": torch.float32, "kv_dtype": torch.float32},
         "queries of torch.float32, KV cache of torch.float32: takes bfloat16 or float16 of both"),
        (GROUPED, {"rope_dim": 0}, "latent rows of 512 + 0: takes powers of two, 16 to 512 and 16 to 64"),
        (GROUPED, {"kv_lora_rank": 384}, "latent rows of 384 + 64: takes powers of two, 16 to 512 and 16 to 64"),
        (GROUPED, {"pool_bytes": (1 << 32) + 1},
         "a pool of 4294967297 bytes: takes up to 2147483648 numbers, it counts in 32 bits"),
        (GROUPED, {"return_lse": True}, "returns no lse"),
        (GROUPED, {"arch": "sm90"}, "runs on gfx942 and gfx950, this is sm90"),
        (GROUPED, {"arch": "cpu"},
         "runs on gfx942 and gfx950; on cpu only with TRITON_INTERPRET=1, and forced by name"),
    ],
)  # fmt: skip
def test_every_reason(row: str, changes: dict[str, Any], reason: str) -> None:
    with aiter_lib.assume("main"):
        assert reasons_of(TABLE, row, cell(**changes)) == [reason]
        with pytest.raises(NoKernelError) as error:  # a forced row takes the same checks
            TABLE.choose(cell(**changes, forced=row), row)
        assert reason in str(error.value)


def test_the_wheel_is_refused_by_the_parameters_that_it_lacks(install: Install) -> None:
    lacks = ("page_size", "nhead_kv", "intra_batch_mode", "return_lse", "causal")
    reasons = {
        DECODE: [f"AITER wheel's mla_decode_fwd has no parameter {name}" for name in lacks],
        GLUON: ["AITER wheel has no mla_gluon"],
        GROUPED: [],
    }
    for row, expected in reasons.items():
        with aiter_lib.assume("wheel"):
            assert reasons_of(TABLE, row, cell(arch="gfx950")) == expected
        with aiter_lib.assume("wheel"):
            assert TABLE.choose(cell()).name == GROUPED and TABLE.choose(cell(captured=False)).name == "triton"
    install("wheel", arch="gfx950")
    assert reasons_of(TABLE, DECODE, cell(arch="gfx950")) == reasons[DECODE]


@pytest.mark.parametrize("function", ["mla_decode_fwd", "get_mla_metadata_info_v1", "get_mla_metadata_v1"])
def test_each_function_of_the_installed_version_is_held_against_what_is_known(install: Install, function: str) -> None:
    path = f"{aiter_lib.MODULES[function]['main']}.{function}"
    first, second, *rest = aiter_lib.signatures("main")[path]
    install("main", {function: [second, first, *rest]})
    (reason,) = reasons_of(TABLE, DECODE, MLA)
    assert reason.startswith(f"the installed AITER's {path} takes ({second}, {first}, ")


def test_a_triton_whose_layouts_have_no_cga_layout_is_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install("main", arch="gfx950")
    has_cga_layout = aiter._gluon_has_cga_layout.__wrapped__
    assert has_cga_layout()
    layouts = tmp_path / "triton" / "experimental" / "gluon" / "language" / "_layouts.py"
    layouts.parent.mkdir(parents=True)
    layouts.write_text("class PaddedSharedLayout:\n    shape: int\nclass Other:\n    cga_layout: int\n")
    old = spec_from_file_location("triton", tmp_path / "triton" / "__init__.py")
    with monkeypatch.context() as patch:
        patch.setattr(aiter.importlib.util, "find_spec", lambda name: old)
        assert not has_cga_layout()
        layouts.unlink()
        assert not has_cga_layout()
        patch.setattr(aiter.importlib.util, "find_spec", lambda name: None)
        assert not has_cga_layout()
    monkeypatch.setattr(aiter, "_gluon_has_cga_layout", lambda: False)
    (reason,) = reasons_of(TABLE, GLUON, cell(arch="gfx950"))
    assert reason.startswith("Triton here has no cga_layout")
    with aiter_lib.assume("main"):
        assert reasons_of(TABLE, GLUON, cell(arch="gfx950")) == [], "what is installed here says nothing of elsewhere"
