"""``atom-plugin doctor`` in whole environments: without SGLang and torch, with both, with an AITER that breaks them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from atom_plugin.doctor.finding import as_json, fail, note, report
from tests.plugin_folder import make_plugin

REPO = Path(__file__).parents[2]


def doctor(
    *arguments: str, python: str = sys.executable, path: list[Path] | None = None, **variables: str
) -> tuple[int, str, str]:
    env = variables | {
        name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "ATOM_PLUGIN_"))
    }
    env["PYTHONPATH"] = os.pathsep.join(map(str, path or []))
    command = [python, "-m", "atom_plugin.cli", "doctor", *arguments]
    # not in the checkout: Python finds packages, and what pip wrote about them, where it is started
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=os.sep)
    return ran.returncode, ran.stdout, ran.stderr


def findings(text: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(text)["findings"]}


def failed(text: str) -> set[str]:
    return {name for name, one in findings(text).items() if one["status"] == "fail"}


def bare(tmp_path: Path) -> tuple[str, list[Path]]:
    """Return the Python of an environment that has our light dependencies alone, and what goes on its path."""
    venv.EnvBuilder(with_pip=False).create(tmp_path / "venv")
    site = tmp_path / "site"
    make_plugin(site, "atom", "atom_plugin.register:register")
    make_plugin(site, "atom_cpu", "atom_plugin.platform:activate", group="sglang.srt.platforms")
    for package in ("atom_plugin", "packaging", *(("tomli",) if sys.version_info < (3, 11) else ())):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        (site / package).symlink_to(Path(spec.origin).parent)
    return str(tmp_path / "venv" / "bin" / "python"), [site]


def test_without_sglang_and_torch(tmp_path: Path) -> None:
    python, path = bare(tmp_path)
    status, out, err = doctor("--json", python=python, path=path)
    assert status == 1, err
    assert failed(out) == {"sglang", "torch", "transformers"}
    found = findings(out)
    assert all(found[name]["found"] == "not installed" and found[name]["remedy"] for name in failed(out))
    assert found["entry point sglang.srt.plugins: atom"]["status"] == "ok"
    status, out, err = doctor("--selftest", python=python, path=path)
    assert status == 1 and "no kernel runs without it" in err and "Traceback" not in err
    assert out.endswith("checks would break a launch with atom: sglang, transformers, torch\n")


def test_an_entry_point_that_is_not_installed(tmp_path: Path) -> None:
    python, path = bare(tmp_path)
    (path[0] / "atom-0.dist-info" / "entry_points.txt").unlink()
    _, out, _ = doctor("--json", python=python, path=path)
    name = "entry point sglang.srt.plugins: atom"
    assert name in failed(out) and "a folder on PYTHONPATH is not enough" in findings(out)[name]["remedy"]


def test_with_sglang_and_without_aiter() -> None:
    """Nothing is wrong: every hook, model and row is there."""
    status, out, err = doctor("--json", path=[REPO])
    assert status == 0 and failed(out) == set(), (failed(out), err[-2000:])
    found = findings(out)
    assert found["aiter"] == {"name": "aiter", "found": "not installed", "remedy": "", "status": "note", "details": []}
    assert found["loaded by SGLang"]["found"] == "yes" and found["attention backend"]["found"] == "atom"
    hooks = [name for name in found if name.startswith("hook ")]
    assert "hook sglang.srt.model_loader.utils.get_model_architecture" in hooks and len(hooks) > 5
    assert found["op mla_attention"]["found"] == "eager"
    assert any("aiter_mla_decode_fwd: does not run:" in line for line in found["op mla_attention"]["details"])
    assert len([name for name in found if name.startswith("model ")]) == 4


def test_with_an_aiter_that_cannot_be_imported(tmp_path: Path) -> None:
    """The package of PyPI on a machine without ROCm: its import raises RuntimeError, and SGLang's imports with it.

    A malformed variable is a fault of its own.
    """
    package = tmp_path / "aiter"
    package.mkdir()
    (package / "__init__.py").write_text('raise RuntimeError("ROCm version file not found")\n')
    info = tmp_path / "amd_aiter-0.1.7.post2.dev18.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.1.7.post2.dev18\n")
    status, out, err = doctor("--json", path=[tmp_path, REPO], ATOM_PLUGIN_FUSE_QK_NORM_ROPE="yes")
    assert status == 1, err
    found = findings(out)
    assert failed(out) == {"aiter", "registration", "ATOM_PLUGIN_FUSE_QK_NORM_ROPE"}
    said = "cannot be imported: RuntimeError: ROCm version file not found"
    assert found["aiter"]["found"] == f"amd-aiter 0.1.7.post2.dev18, taken for AITER wheel, {said}"
    assert "pip uninstall amd-aiter: this machine (cpu) has no ROCm" in found["aiter"]["remedy"]
    assert "SGLang cannot be imported: ROCm version file not found" in found["registration"]["found"]


def test_the_report_ends_with_a_verdict() -> None:
    text = report([fail("x", "bad", "mend it", ["line"]), note("y", "odd")])
    assert text == (
        "FAIL  x: bad\n        line\n      -> mend it\nnote  y: odd\n1 of 2 checks would break a launch with atom: x"
    )
    assert report([note("y", "odd")]).endswith("\nnothing here would break a launch with atom")
    assert json.loads(as_json([note("y", "odd")], [{"row": "x"}]))["selftest"] == [{"row": "x"}]
