"""Every name and signature of SGLang that we use is in the wheels at both ends and in the middle of the range."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from atom_plugin import host
from tests.host.sglang_names import Report, check
from tests.host.wheel_source import WheelSource
from tests.wheels import unpacked

REPO = Path(__file__).parents[2]
FOLDERS = ("atom_plugin", "models", "configs")
#: What every file is read together with.
KEPT = ("atom_plugin/host.py", "atom_plugin/refusals.py", "atom_plugin/layers/attention.py")
#: Fewer of a kind than this, and the collection has lost sight of our sources.
AT_LEAST = {"import": 60, "attribute": 140, "call": 50, "flag": 40, "override": 15, "hook": 10}


@functools.cache
def wheel(version: str) -> WheelSource:
    """Return the source of an SGLang release."""
    return WheelSource(unpacked(f"sglang=={version}"))


def sources() -> dict[str, str]:
    """Return our sources, path -> text."""
    paths = [path for folder in FOLDERS for path in sorted((REPO / folder).rglob("*.py"))]
    return {str(path.relative_to(REPO)): path.read_text() for path in paths}


def report(version: str, *, path: str = "", old: str = "", new: str = "") -> Report:
    """Return the report on our sources, with ``old`` in the file ``path`` planted over by ``new``."""
    texts = sources()
    if path:
        assert texts[path].count(old) >= 1, f"{path} has no {old!r} any more"
        texts = {name: text for name, text in texts.items() if name in (path, *KEPT) or "/cpu/" in name}
        texts[path] = texts[path].replace(old, new)
    return check(texts, wheel(version), version)


#: The other releases of the range: 40 MB each to download.
BETWEEN = [pytest.param(version, marks=pytest.mark.slow) for version in ("0.5.18", "0.5.19", "0.5.20", "0.5.22")]


@pytest.mark.parametrize("version", [*host.TESTED_SGLANG, *BETWEEN])
def test_every_name_and_signature_is_there(version: str) -> None:
    """Imports, hook targets, attributes, arguments, overridden methods and flags, as this version sees our branches."""
    found = report(version)
    print(f"SGLang {version}: {dict(found.checked)}")
    assert found.problems == []
    assert not {kind: found.checked[kind] for kind, least in AT_LEAST.items() if found.checked[kind] < least}


def test_the_range_ends_with_what_is_tested() -> None:
    """The oldest tested release opens the range, and the newest one is in it."""
    inside = SpecifierSet(host.SUPPORTED_SGLANG)
    assert host.SUPPORTED_SGLANG.startswith(f">={host.TESTED_SGLANG[0]},")
    assert all(version in inside for version in host.TESTED_SGLANG)


@pytest.mark.parametrize(
    ("version", "path", "old", "new", "problem"),
    [
        (
            "0.5.23",
            "atom_plugin/layers/mlp.py",
            "import SiluAndMul",
            "import SiluAndMuls",
            "sglang.srt.layers.activation has no SiluAndMuls",
        ),
        (  # a name of later versions, out of its branch
            "0.5.17",
            "atom_plugin/host.py",
            '    if since("0.5.19"):\n        from sglang.srt.arg_groups.model_override_base',
            "    if True:\n        from sglang.srt.arg_groups.model_override_base",
            "sglang.srt.arg_groups.model_override_base has no model_config_of",
        ),
        (  # the branch of the wrong version
            "0.5.21",
            "atom_plugin/host.py",
            '    if since("0.5.23"):\n        topk.bind',
            '    if since("0.5.21"):\n        topk.bind',
            "topk: sglang.srt.layers.moe.topk.TopK has no bind_runner_backend",
        ),
        (
            "0.5.17",
            "atom_plugin/host.py",
            'if since("0.5.20"):\n        return forward_batch',
            'if not since("0.5.20"):\n        return forward_batch',
            "ForwardBatch has no global_num_token_non_padded_cpu",
        ),
        (
            "0.5.23",
            "atom_plugin/layers/attention.py",
            "reduce_results=False",
            "reduce_result=False",
            "unexpected keyword argument 'reduce_result'",
        ),
        (
            "0.5.21",
            "atom_plugin/layers/parallel.py",
            "dp_scatter(own_TD, everyone_TD, forward_batch)",
            "dp_scatter(own_TD, everyone_TD)",
            "missing a required argument: 'forward_batch'",
        ),
        (
            "0.5.23",
            "atom_plugin/layers/attention.py",
            "attended = self.attn(q, k, v.contiguous(), forward_batch)",
            "attended = self.attn(q, k, v.contiguous())",
            "missing a required argument: 'forward_batch'",
        ),
        (
            "0.5.17",
            "atom_plugin/cpu/install.py",
            "fused_moe_native.moe_forward_native",
            "fused_moe_native.moe_forward",
            "hook target sglang.srt.layers.moe.fused_moe_native.moe_forward is not there",
        ),
        (
            "0.5.17",
            "atom_plugin/cpu/communication.py",
            "offset_is_in_src: bool) -> None",
            ") -> None",
            "hook on sglang.kernels.ops.memory.memcpy_triton.memcpy_triton",
        ),
        (
            "0.5.23",
            "atom_plugin/attention/backend.py",
            "def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int)",
            "def init_cuda_graph_state(self, max_bs: int)",
            "AtomAttentionBackend.init_cuda_graph_state overrides",
        ),
        (
            "0.5.21",
            "atom_plugin/refusals.py",
            'field="enable_pdmux"',
            'field="enable_pd_mux"',
            "the server has no flag enable_pd_mux",
        ),
        (
            "0.5.17",
            "atom_plugin/host.py",
            '"enable_layernorm_sp": "0.5.19", ',
            "",
            "the server has no flag enable_layernorm_sp",
        ),
        (
            "0.5.21",
            "atom_plugin/host.py",
            '"enable_layernorm_sp": "0.5.19", ',
            '"enable_layernorm_sp": "0.5.23", ',
            "the server has already the flag enable_layernorm_sp",
        ),
        (  # keyword arguments that host.py hands over as a dict
            "0.5.23",
            "atom_plugin/host.py",
            'if since("0.5.22"):\n        return {"parallel',
            'if since("0.5.24"):\n        return {"parallel',
            "unexpected keyword argument 'tp_rank'",
        ),
        (
            "0.5.23",
            "atom_plugin/refusals.py",
            "cfg.disable_cuda_graph",
            "cfg.disable_cuda_graphs",
            "sglang.srt.server_args.ServerArgs has no disable_cuda_graphs",
        ),
    ],
)
def test_planted(version: str, path: str, old: str, new: str, problem: str) -> None:
    """Each kind of drift is found."""
    found = report(version, path=path, old=old, new=new).problems
    assert any(problem in line for line in found), found
