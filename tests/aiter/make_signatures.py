"""Write atom_plugin/signatures/VERSION.json from AITER's source: names and defaults of the functions named below.

    python tests/aiter/make_signatures.py wheel FOLDER   # the unpacked wheel amd-aiter 0.1.7.post2.dev18
    python tests/aiter/make_signatures.py main FOLDER    # a checkout of ROCm/aiter at e4048607

FOLDER holds the package folder ``aiter``. Nothing of it is run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from atom_plugin import aiter_lib

SIGNATURES = Path(aiter_lib.__file__).parent / "signatures"
#: Function -> the modules that may define it; a version has what one of its modules defines.
WANTED = {
    # attention over paged K and V
    "unified_attention": ("ops.triton.unified_attention", "ops.triton.attention.unified_attention"),
    "paged_attention_ragged": ("ops.attention",),
    "paged_attention_v1": ("ops.attention",),
    "paged_attention_rocm": ("ops.attention",),
    "paged_attention_common": ("ops.attention",),
    "pa_fwd_asm": ("ops.attention",),
    "pa_persistent_fwd": ("ops.attention",),
    "get_pa_metadata_info_v1": ("ops.attention",),
    "get_pa_metadata_v1": ("ops.attention",),
    "pa_decode_gluon": ("ops.triton.gluon.pa_decode_gluon",),
    "flash_attn_varlen_func": ("ops.mha",),
    "flash_attn_varlen_fp8_pertensor_func": ("ops.mha",),
    "mha_batch_prefill_func": ("ops.mha",),
    # writers
    "reshape_and_cache": ("ops.cache",),
    "reshape_and_cache_flash": ("ops.cache",),
    "reshape_and_cache_with_pertoken_quant": ("ops.cache",),
    "reshape_and_cache_with_block_quant": ("ops.cache",),
    "fused_qk_norm_rope_cache_quant_shuffle": ("ops.fused_qk_norm_rope_cache_quant",),
    "fused_qk_norm_rope_cache_block_quant_shuffle": ("ops.fused_qk_norm_rope_cache_quant",),
    "fused_qk_norm_rope_cache_pts_quant_shuffle": ("ops.fused_qk_norm_rope_cache_quant",),
    "fused_qk_norm_mrope_3d_cache_pts_quant_shuffle": ("ops.fused_qk_norm_mrope_cache_quant",),
    "fused_qk_rope_reshape_and_cache": ("ops.triton.fused_kv_cache", "ops.triton.fusions.fused_kv_cache"),
    # MLA
    "concat_and_cache_mla": ("ops.cache",),
    "fused_qk_rope_concat_and_cache_mla": ("ops.cache",),
    "fused_qk_rope_cat_and_cache_mla": ("ops.triton.fused_kv_cache", "ops.triton.fusions.fused_kv_cache"),
    "cat_and_cache_mla": ("ops.triton.kv_cache",),
    "mla_decode_fwd": ("mla", "ops.triton.attention.mla"),
    "mla_prefill_fwd": ("mla", "ops.triton.attention.mla"),
    "get_mla_metadata_info_v1": ("ops.attention",),
    "get_mla_metadata_v1": ("ops.attention",),
    "mla_reduce_v1": ("ops.attention",),
    "mla_prefill_ps_asm_fwd": ("ops.attention",),
    "get_ps_metadata_info_v1": ("ops.attention",),
    "get_ps_metadata_v1": ("ops.attention",),
    "mla_gluon": ("ops.triton.gluon.mla_gluon",),
    "decode_attention_fwd": ("ops.triton.attention.mla_decode",),
    "decode_attention_fwd_grouped_rope": ("ops.triton.mla_decode_rope", "ops.triton.attention.mla_decode_rope"),
}


def signatures_in(package: Path) -> dict[str, list[str]]:
    """Return dotted path -> parameters of what the package in the folder ``package`` defines of WANTED."""
    found = {}
    for function, modules in WANTED.items():
        for module in modules:
            parameters = aiter_lib.parameters_in(package.joinpath(*module.split(".")).with_suffix(".py"), function)
            if parameters is not None:
                found[f"aiter.{module}.{function}"] = parameters
    return dict(sorted(found.items()))


def as_json(signatures: dict[str, list[str]]) -> str:
    """Return one function a line, so that a diff names what changed."""
    rows = [f"  {json.dumps(path)}: {json.dumps(parameters)}" for path, parameters in signatures.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main(version: str, folder: str) -> None:
    """Write one file and print what it holds."""
    if version not in aiter_lib.VERSIONS:
        raise SystemExit(f"{version}: one of {', '.join(aiter_lib.VERSIONS)}")
    found = signatures_in(Path(folder) / "aiter")
    (SIGNATURES / f"{version}.json").write_text(as_json(found))
    absent = sorted(set(WANTED) - {path.rpartition(".")[2] for path in found})
    print(f"{version}: {len(found)} functions; not there: {', '.join(absent) or 'none'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
