"""A stand-in for AITER on a machine that answers as an MI300X, without gradients and with poisoned memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from atom_plugin import aiter_lib, device
from atom_plugin.ops.mla_attention import aiter as mla_rows
from atom_plugin.ops.paged_attention import aiter as attention_rows
from atom_plugin.ops.qk_norm_rope_store_kv import aiter as norm_rope_rows
from atom_plugin.ops.store_kv import aiter as store_rows
from tests.aiter import mla_stand_in, stand_in
from tests.ops.interpreted import triton_interpreter  # noqa: F401
from tests.ops.poison import poison_empty

Install = Callable[..., None]
DECLARED = {
    "paged_attention_ragged": attention_rows._RAGGED_PASSED,
    "mha_batch_prefill_func": attention_rows._PREFILL_PASSED,
    "reshape_and_cache_flash": store_rows._PASSED,
    "fused_qk_norm_rope_cache_pts_quant_shuffle": norm_rope_rows._NORMED_PASSED,
    "fused_qk_rope_reshape_and_cache": norm_rope_rows._PLAIN_PASSED,
    "mla_decode_fwd": mla_rows.DECODE_PASSED,
    "get_mla_metadata_info_v1": mla_rows.INFO_PASSED,
    "get_mla_metadata_v1": mla_rows.METADATA_PASSED,
    "mla_gluon": mla_rows.GLUON_PASSED,
}


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    poison_empty(monkeypatch)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Return ``install(version, changes=None, arch="gfx942")``, which makes AITER a stand-in until the test ends."""

    def install(
        version: aiter_lib.Version, changes: dict[str, list[str] | None] | None = None, arch: str = "gfx942"
    ) -> None:
        stand_in.write_package(tmp_path, version, changes)
        stand_in.CALLS.clear(), stand_in.PASSED.clear(), mla_stand_in.PLANNED.clear()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(device, "arch", lambda: arch)
        monkeypatch.setattr(device, "num_multiprocessors", lambda: mla_stand_in.COMPUTE_UNITS[arch])

    yield install
    for function, passed in stand_in.PASSED.items():  # a row's refusals are about the call that it makes
        optional = {"kv_last_page_lens"} if function == "mha_batch_prefill_func" else set()
        assert passed - optional == set(DECLARED[function]) - optional, function
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.fixture
def interpreted_calls(triton_interpreter: None) -> Iterator[None]:  # noqa: F811
    """Let the Triton kernels around AITER's be interpreted: what imported them before is imported anew."""
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.endswith(".aiter_calls")}
    yield
    for name in [name for name in sys.modules if name.endswith(".aiter_calls")]:
        del sys.modules[name]
    sys.modules.update(held)
