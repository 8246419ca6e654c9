"""What SGLang resolves in a fresh process: the platform, what activation costs, and where the hooks are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., "subprocess.CompletedProcess[str]"]

OURS = "atom_plugin.cpu.srt_platform.AtomCpuPlatform"
OTHER = "other_platform.Other"
NONE = "sglang.srt.platforms.interface.SRTPlatform"
SGLANG = "sglang.srt.platforms.cpu.CpuSRTPlatform"

#: name -> (what the second platform plugin answers, None where there is none; environment; the platform resolved)
SCENARIOS: dict[str, tuple[str | None, dict[str, str], str]] = {
    "bare machine": (None, {}, OURS),
    "selected by name": (None, {"SGLANG_PLATFORM": "atom_cpu"}, OURS),
    "SGLang's CPU engine": (None, {"SGLANG_USE_CPU_ENGINE": "1"}, SGLANG),
    "only atom listed": (None, {"SGLANG_PLUGINS": "atom"}, NONE),
    "only atom_cpu listed": (None, {"SGLANG_PLUGINS": "atom_cpu"}, OURS),
    "second plugin activates": (repr(OTHER), {}, OTHER),
    "second plugin does not activate": ("None", {}, NONE),
    "second plugin, ours selected": (repr(OTHER), {"SGLANG_PLATFORM": "atom_cpu"}, OURS),
    "second plugin selected": (repr(OTHER), {"SGLANG_PLATFORM": "other"}, OTHER),
    "second plugin not listed": (repr(OTHER), {"SGLANG_PLUGINS": "atom,atom_cpu"}, OURS),
    "selected by name beside the CPU engine": (
        None,
        {"SGLANG_PLATFORM": "atom_cpu", "SGLANG_USE_CPU_ENGINE": "1"},
        "RuntimeError: SGLANG_PLATFORM=atom_cpu asks for the CPU platform of atom-plugin, but SGLANG_USE_CPU_ENGINE=1 "
        "selects SGLang's own CPU engine: unset it to use ours.",
    ),
}

RESOLVE = """
import json, os, sys
from sglang.srt import platforms
results = []
for folder, env in json.loads(sys.argv[1]):
    sys.path[:0] = folder
    os.environ.update(env)
    sys.modules.pop("other_platform", None)
    try:
        cls = type(platforms._resolve_platform())
        results.append(f"{cls.__module__}.{cls.__qualname__}")
    except RuntimeError as error:
        results.append(f"RuntimeError: {error}")
    for name in env:
        del os.environ[name]
    del sys.path[: len(folder)]
print(json.dumps(results))
"""

IMPORTS = """
import json, sys
order = []
class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        order.append(name)
sys.meta_path.insert(0, Watch)
import sglang.srt.platforms
ours = [i for i, name in enumerate(order) if name.startswith("atom_plugin")]
print(json.dumps(order[ours[0] : ours[-1] + 1]))
"""


def last_line(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_sglang_resolves_the_documented_platform(second_platform: Callable[[str, str], Path], run_python: Run) -> None:
    calls = [
        [[str(second_platform(f"second{i}", answer))] if answer else [], env]
        for i, (answer, env, _) in enumerate(SCENARIOS.values())
    ]
    found = dict(zip(SCENARIOS, last_line(run_python("-c", RESOLVE, json.dumps(calls))), strict=True))
    assert found == {name: expected for name, (_, _, expected) in SCENARIOS.items()}


def test_activation_imports_nothing_heavy(run_python: Run) -> None:
    """What is imported from our entry point to our class, when SGLang's own import resolves the platform."""
    imported = last_line(run_python("-c", IMPORTS))
    assert imported[-1].startswith("atom_plugin.cpu.")
    assert {name.partition(".")[0] for name in imported} <= {"atom_plugin", "packaging", "multiprocessing"}


HOOKS = """
import json
from atom_plugin import hooks
from atom_plugin.cpu.install import ROWS, install_cpu_hooks
install_cpu_hooks()
print(json.dumps({row.target: [row.applies(), hooks.is_applied(row)] for row in ROWS}))
"""


def test_rows_go_in_where_this_sglang_needs_them(run_python: Run) -> None:
    for target, (needed, applied) in last_line(run_python("-c", HOOKS)).items():
        assert applied == needed, target


def test_rows_stay_out_on_another_platform(run_python: Run) -> None:
    rows = last_line(run_python("-c", HOOKS, env={"SGLANG_PLUGINS": "atom"}))
    assert not any(applied for _, applied in rows.values())


def launch(run: Run, *flags: str, plugins: str, model: Path) -> subprocess.CompletedProcess[str]:
    (model / "config.json").write_text(json.dumps(TINY))
    command = ["-m", "sglang.launch_server", "--model-path", str(model), "--load-format", "dummy"]
    return run(*command, "--skip-tokenizer-init", *flags, env={"SGLANG_PLUGINS": plugins})


TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


def test_platform_alone_refuses_to_serve_in_our_name(run_python: Run, tmp_path: Path) -> None:
    done = launch(run_python, "--model-impl", "atom", plugins="atom_cpu", model=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "--model-impl atom: the plugin atom of atom-plugin is not loaded, so SGLang would serve its own model. "
        "SGLANG_PLUGINS=atom_cpu leaves it out: set SGLANG_PLUGINS=atom_cpu,atom, or unset it."
    )


def test_general_plugin_alone_names_the_platform(run_python: Run, tmp_path: Path) -> None:
    done = launch(run_python, "--model-impl", "atom", plugins="atom", model=tmp_path)
    assert done.returncode == 1
    assert "SGLANG_PLUGINS=atom leaves atom_cpu out: set SGLANG_PLUGINS=atom,atom_cpu" in done.stderr
