"""The entry point: nothing changes without atom, a broken plugin ends an atom launch, a hook that is lost is loud.

Each case runs in a Python process of its own, as SGLang loads plugins once a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from atom_plugin import host
from atom_plugin.doctor import variables, versions

MODEL = Path(__file__).parents[2] / "examples" / "tiny-qwen3-moe"
#: SGLang's own CPU platform: our platform stays out, as on any machine that has an accelerator.
OWN_PLATFORM = {"SGLANG_USE_CPU_ENGINE": "1"}

CHECK = f"""
def check(**flags):
    from sglang.srt.server_args import ServerArgs
    args = ServerArgs(model_path={str(MODEL)!r}, device="cpu", **flags)
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    args.check_server_args()
    return args
"""


def run(
    code: str, *, env: dict[str, str] | None = None, argv: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` after ``check`` has been defined."""
    import os

    return subprocess.run(
        [sys.executable, "-c", CHECK + textwrap.dedent(code), *argv],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )


def printed(ran: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """Return the JSON on the last line of a successful run."""
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_installed_and_unused_costs_nothing_heavy() -> None:
    """In the main process our entry point imports none of SGLang, torch or transformers that is not there already."""
    facts = printed(
        run(
            """
            import json, sys, time
            import sglang.launch_server
            before, start = set(sys.modules), time.perf_counter()
            from sglang.srt.plugins import load_plugins
            from importlib.metadata import entry_points
            (entry,) = entry_points(group="sglang.srt.plugins", name="atom")
            entry.load()()
            seconds = time.perf_counter() - start
            new = sorted({name for name in set(sys.modules) - before if not name.startswith("atom_plugin")})
            print(json.dumps({"seconds": seconds, "new": new}))
            """,
            env=OWN_PLATFORM,
        )
    )
    print(f"entry point: {facts['seconds']:.3f} s, new modules {facts['new']}")
    assert not [name for name in facts["new"] if name.split(".")[0] in ("torch", "transformers", "sglang", "aiter")]


def test_auto_is_untouched() -> None:
    """Without atom: SGLang's own class, SGLang's own default backend, and no refusal of what atom would refuse."""
    facts = printed(
        run(
            """
            import json
            from sglang.srt.plugins import load_plugins
            load_plugins()
            from atom_plugin import host, register
            args = check(model_impl="auto", cpu_offload_gb=1)
            from sglang.srt.model_loader.utils import get_model_architecture
            cls, arch = get_model_architecture(host.model_config(args))
            print(json.dumps({"class": cls.__module__, "backend": host.resolved(args).attention_backend,
                              "complete": register.complete}))
            """
        )
    )
    assert facts == {"class": "sglang.srt.models.qwen3_moe", "backend": "torch_native", "complete": True}


def test_atom_resolves_to_our_class_by_both_names() -> None:
    """With atom: our class under the architecture's own name, marked as SGLang's implementation, not Transformers'."""
    facts = printed(
        run(
            """
            import json
            from sglang.srt.plugins import load_plugins
            load_plugins()
            from atom_plugin import host
            args = check(model_impl="atom")
            from sglang.srt.model_loader.utils import get_model_architecture, get_resolved_model_impl
            config = host.model_config(args)
            cls, arch = get_model_architecture(config)
            print(json.dumps({"class": f"{cls.__module__}.{cls.__name__}", "arch": arch,
                              "impl": get_resolved_model_impl(config).value,
                              "backend": host.resolved(args).attention_backend}))
            """
        )
    )
    assert facts == {
        "class": "atom_plugin.models.qwen3_moe.Qwen3MoeForCausalLM",
        "arch": "Qwen3MoeForCausalLM",
        "impl": "sglang",
        "backend": "atom",
    }


BREAK = """
from sglang.srt.plugins import load_plugins
from atom_plugin import host
def broken(name):
    raise AttributeError("SGLang has no such registry")
host.add_attention_backend_choice = broken
load_plugins()
"""


@pytest.mark.parametrize("flags", ["model_impl='atom'", "attention_backend='atom'"])
def test_a_plugin_that_failed_ends_an_atom_launch(flags: str) -> None:
    """SGLang swallows our exception; the launch that asked for us ends all the same, with the reason in the log."""
    ran = run(f"{BREAK}\ncheck({flags})")
    assert ran.returncode != 0
    assert "atom-plugin failed to load in this process" in ran.stderr
    assert "SGLang has no such registry" in ran.stderr


def test_a_plugin_that_failed_leaves_auto_alone() -> None:
    """The same failure does not touch a launch without atom."""
    ran = run(f"{BREAK}\ncheck(attention_backend='torch_native')\nprint('checked')")
    assert ran.returncode == 0 and "checked" in ran.stdout, ran.stderr[-2000:]


@pytest.mark.parametrize(
    ("argv", "ends"),
    [(("--model-impl", "atom"), True), (("--model-impl=atom",), True), (("--model-impl", "auto"), False)],
)
def test_an_sglang_without_our_gate(argv: tuple[str, ...], ends: bool) -> None:
    """Where the one hook that guards the rest cannot be put in, the command line decides: atom ends, auto goes on."""
    ran = run(
        """
        import dataclasses
        from atom_plugin import register
        register.GATE = dataclasses.replace(register.GATE, target="sglang.srt.server_args.ServerArgs.moved_away")
        from sglang.srt.plugins import load_plugins
        load_plugins()
        print("went on")
        """,
        argv=argv,
    )
    assert ("went on" in ran.stdout) != ends
    assert "did not take our hooks on: sglang.srt.server_args.ServerArgs.moved_away" in ran.stderr


def test_an_sglang_without_our_gate_and_no_command_line() -> None:
    """From Engine or a --config file nothing shows on the command line: the model's look-up refuses atom instead."""
    ran = run(
        """
        import dataclasses
        from atom_plugin import register
        register.GATE = dataclasses.replace(register.GATE, target="sglang.srt.server_args.ServerArgs.moved_away")
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.model_loader.utils import get_model_architecture
        from atom_plugin import host
        print(get_model_architecture(host.model_config(check(model_impl="auto")))[0].__module__)
        get_model_architecture(host.model_config(check(model_impl="atom", attention_backend="torch_native")))
        """
    )
    assert "sglang.srt.models.qwen3_moe" in ran.stdout
    assert ran.returncode != 0 and "--model-impl atom: atom-plugin failed to load in this process" in ran.stderr


INSIDE = ("0.5.17", "0.5.18", "0.5.23", "0.5.23.post1", "0.5.23+rocm700", "0.5.23.post1+g1a2b3c")
OUTSIDE = ("0.5.16", "0.5.16.post2", "0.5.17.dev3", "0.5.17rc1", "0.5.23rc1", "0.5.23.dev7+g1a2b3c", "0.5.24",
           "0.5.24.dev5+g1a2b3c", "0.6.0", "0.0.0.dev1")  # fmt: skip


@pytest.mark.parametrize("version", [*INSIDE, *OUTSIDE])
def test_the_supported_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEP 440: post-releases and local builds of a supported release are in, candidates and development builds out."""
    monkeypatch.setattr(host, "sglang_version", lambda: version)
    reason = host.why_not_version()
    if version in INSIDE:
        assert reason == ""
    else:
        assert (
            reason == f"atom-plugin supports the releases of SGLang >=0.5.17,<0.5.24, and SGLang {version} is installed"
        )


def fake(version: str) -> str:
    """Return code that loads the plugins under an SGLang that calls itself ``version``."""
    return f"""
from atom_plugin import host
host.sglang_version = lambda: {version!r}
host.since.cache_clear()
from sglang.srt.plugins import load_plugins
load_plugins()
"""


@pytest.mark.parametrize(
    ("version", "flags", "asked"),
    [
        # a source build without tags sorts below every release
        ("0.0.0.dev1", "model_impl='atom', attention_backend='torch_native'", "--model-impl atom"),
        ("0.5.24.dev5+g1a2b3c", "attention_backend='atom'", "--attention-backend atom"),
    ],
)
def test_a_version_outside_of_the_range_ends_an_atom_launch(version: str, flags: str, asked: str) -> None:
    """The gate goes in all the same, lets a launch without atom pass, and says what is asked, there and to be done."""
    ran = run(f"{fake(version)}\ncheck(attention_backend='torch_native')\nprint('auto checked')\ncheck({flags})")
    assert "auto checked" in ran.stdout and ran.returncode != 0
    assert (
        f"{asked}: atom-plugin supports the releases of SGLang >=0.5.17,<0.5.24, and SGLang {version} is installed. "
        "Install one of them, or set ATOM_PLUGIN_ALLOW_SGLANG=1 to try this one, untested, or launch without atom."
    ) in ran.stderr


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_what_is_no_version_ends_an_atom_launch(allowed: str) -> None:
    """A build that calls itself "unknown" cannot be compared: refused, allowed or not; others launch."""
    code = (
        f"{fake('unknown')}\ncheck(attention_backend='torch_native')\nprint('auto checked')\ncheck(model_impl='atom')"
    )
    ran = run(code, env={"ATOM_PLUGIN_ALLOW_SGLANG": allowed})
    assert "auto checked" in ran.stdout and ran.returncode != 0, ran.stderr[-3000:]
    assert (
        "--model-impl atom: atom-plugin supports the releases of SGLang >=0.5.17,<0.5.24, and SGLang unknown is "
        "installed. Install one of them: ATOM_PLUGIN_ALLOW_SGLANG=1 does not help where there is no version (PEP 440), "
        "or launch without atom."
    ) in ran.stderr


def test_a_version_outside_of_the_range_that_is_allowed() -> None:
    """ATOM_PLUGIN_ALLOW_SGLANG=1 makes it a warning, and the launch is checked like any other."""
    after = f"{metadata.version('sglang')}.post1.dev9"  # newer than the SGLang that is here, and taken for it
    code = f"{fake(after)}\ncheck(model_impl='atom', attention_backend='torch_native')\nprint('atom checked')"
    ran = run(code, env={"ATOM_PLUGIN_ALLOW_SGLANG": "1"})
    assert ran.returncode == 0 and "atom checked" in ran.stdout, ran.stderr[-3000:]
    assert "is installed: it is served because ATOM_PLUGIN_ALLOW_SGLANG=1, untested" in ran.stderr


def test_a_malformed_permission_is_none() -> None:
    """Another value than 0 and 1 is an error that names the variable, and atom stays refused."""
    ran = run(f"{fake('0.6.0')}\ncheck(model_impl='atom')", env={"ATOM_PLUGIN_ALLOW_SGLANG": "yes"})
    assert ran.returncode != 0 and "atom-plugin failed to load in this process" in ran.stderr
    assert "ATOM_PLUGIN_ALLOW_SGLANG='yes' is not valid: 0 or 1 is accepted" in ran.stderr


@pytest.mark.parametrize(("allowed", "status"), [("0", "fail"), ("1", "note"), ("yes", "fail")])
def test_doctor_says_the_same(allowed: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault with its ways out, or a note where it is allowed; a malformed permission is a fault of its own."""
    monkeypatch.setattr(host, "sglang_version", lambda: "0.6.0")
    monkeypatch.setenv("ATOM_PLUGIN_ALLOW_SGLANG", allowed)
    findings = {one.name: one for one in (*versions.check_versions(), *variables.check_variables("cpu"))}
    told = findings["SGLang range"]
    reason = "atom-plugin supports the releases of SGLang >=0.5.17,<0.5.24, and SGLang 0.6.0 is installed"
    assert told.status == status and told.found.startswith(reason)
    assert told.remedy.startswith("Install one of them, or set ATOM_PLUGIN_ALLOW_SGLANG=1") == (status == "fail")
    assert ("is served because ATOM_PLUGIN_ALLOW_SGLANG=1" in told.found) == (allowed == "1")
    assert (findings["ATOM_PLUGIN_ALLOW_SGLANG"].status == "fail") == (allowed == "yes")


def test_other_plugins_hooks_on_the_same_function_survive() -> None:
    """A plugin that hooked the function before us and one that hooks it after us both still run."""
    facts = printed(
        run(
            """
            import json
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType
            seen = []
            target = "sglang.srt.server_args.ServerArgs.check_server_args"
            def note(word):
                def hook(original, *args, **kwargs):
                    seen.append(word)
                    return original(*args, **kwargs)
                return hook
            HookRegistry.register(target, note("before"), HookType.AROUND)
            from sglang.srt.plugins import load_plugins
            load_plugins()
            HookRegistry.register(target, note("after"), HookType.AROUND)
            HookRegistry.apply_hooks()
            from atom_plugin import hooks, register
            check(attention_backend="torch_native")
            print(json.dumps({"seen": sorted(seen), "ours": hooks.is_applied(register.GATE)}))
            """
        )
    )
    assert facts == {"seen": ["after", "before"], "ours": True}


def test_two_broken_model_modules_are_loud() -> None:
    """A model module of ours that cannot be imported is an error of the launch, not SGLang's own model."""
    ran = run(
        """
        import sys
        sys.modules["atom_plugin.models.qwen3_moe"] = None
        from sglang.srt.plugins import load_plugins
        load_plugins()
        check(model_impl="atom")
        """
    )
    assert ran.returncode != 0 and "atom_plugin.models.qwen3_moe" in ran.stderr
