"""Each check of the doctor: what it fails for, what it only notes, and the remedy that it names."""

from __future__ import annotations

import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from atom_plugin import doctor, host
from atom_plugin.attention.tables import TABLES
from atom_plugin.doctor import aiter, machine, registration, resources, rows, variables, versions
from atom_plugin.doctor.finding import Finding

GIB = 1 << 30


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*(one.name for one in variables.VARIABLES), "ATOM_PLUGIN_KERNELS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("package", "version", "status", "text"),
    [
        ("transformers", "4.57.5", "fail", "install transformers >=4.57.6"),
        ("transformers", "5.30.0", "note", "5.30.0: not tested, >=4.57.6,<=5.19.0 is"),
        ("torch", "2.11.0+rocm7.2", "ok", "2.11.0+rocm7.2"),
        ("torch", "2.8.0", "note", "not tested"),
        ("torch", "unknown", "note", "no version by PEP 440"),
        ("triton", "3.6.0", "ok", "3.6.0"),
    ],
)
def test_versions(package: str, version: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: version if name == package else real(name))
    found = by_name(versions.check_versions())[package]
    assert found.status == status and text in f"{found.found} {found.remedy}"


def test_the_triton_of_rocm_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "pytorch-triton-rocm":
            return "3.6.0+git1234"
        raise versions.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", version)
    assert by_name(versions.check_versions())["triton"] == Finding("triton", "3.6.0+git1234")


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows needs torch, and is left out; the rest is still there."""

    def broken(name: str) -> Any:
        raise OSError("libamdhip64.so.7: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = by_name(doctor.examine())
    assert found["import torch"].status == "fail" and "libamdhip64" in found["import torch"].found
    assert "device" not in found and "memory" in found
    assert doctor.lacks_torch(list(found.values()))


@pytest.mark.parametrize(
    ("name", "value", "arch", "status", "text"),
    [
        ("SGLANG_PLUGINS", "other", "cpu", "fail", "add atom, or unset it"),
        ("SGLANG_PLUGINS", "atom", "cpu", "fail", "add atom_cpu"),
        ("SGLANG_PLUGINS", "atom", "gfx942", "note", "which plugins SGLang loads"),
        ("SGLANG_PLUGINS", "atom,atom_cpu", "cpu", "note", "which plugins SGLang loads"),
        ("SGLANG_PLATFORM", "other", "cpu", "fail", "leaves out all of atom-plugin"),
        ("SGLANG_PLATFORM", "atom_cpu", "cpu", "note", "which platform plugin"),
        ("SGLANG_AITER_KV_CACHE_LAYOUT", "vectorized_5d", "gfx950", "fail", "reads NHD pools alone"),
        ("SGLANG_AITER_KV_CACHE_LAYOUT", "nhd", "gfx950", "note", "layout of the KV pool on AMD"),
        ("SGLANG_USE_HND_KVCACHE", "true", "sm90", "fail", "reads NHD pools alone"),
        ("TRITON_INTERPRET", "1", "gfx942", "fail", "interpreted on the host"),
        ("TRITON_INTERPRET", "1", "cpu", "note", "whether Triton kernels are interpreted"),
        ("HSA_OVERRIDE_GFX_VERSION", "9.4.2", "gfx942", "fail", "kernels are chosen for gfx942"),
        ("SGLANG_USE_AITER", "1", "gfx942", "note", "AITER in SGLang's own layers"),
        ("SGLANG_EXTERNAL_MODEL_PACKAGE", "x", "sm90", "note", "a comparison is not with SGLang's own then"),
        ("ATOM_PLUGIN_KERNEL", "store_kv=eager", "cpu", "fail", "did you mean ATOM_PLUGIN_KERNELS?"),
        ("ATOM_PLUGIN_KERNELS", "store_kv", "cpu", "fail", "correct or unset it"),
        ("AITER_LOG_LEVEL", "DEBUG", "gfx942", "note", "AITER_LOG_LEVEL=DEBUG"),
    ],
)
def test_variables(name: str, value: str, arch: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    found = by_name(variables.check_variables(arch))
    one = found.get(name) or found["other variables"]
    assert one.status == status and text in " ".join([one.found, one.remedy, *one.details])


def test_sglangs_layers_without_aiter_are_noted_on_amd_alone() -> None:
    assert "do without AITER" in by_name(variables.check_variables("gfx942"))["SGLANG_USE_AITER"].found
    assert "SGLANG_USE_AITER" not in by_name(variables.check_variables("sm90"))


def test_names_of_variables_are_sglangs() -> None:
    """Each is read by the SGLang that is here; a renamed one would be judged for nothing."""
    import sglang

    srt = Path(sglang.__file__).parent / "srt"
    text = "\n".join((srt / name).read_text() for name in ("environ.py", "utils/common.py"))
    not_sglangs = {"TRITON_INTERPRET", "HSA_OVERRIDE_GFX_VERSION"}
    assert not [one.name for one in variables.VARIABLES if one.name not in text and one.name not in not_sglangs]


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("gib", "status"), [(0.1, "fail"), (5, "note"), (50, "ok")])
def test_disks(gib: float, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, int(gib * GIB)))
    found = by_name(resources.check_resources())["disk of models (HF_HUB_CACHE)"]
    assert found.status == status and str(tmp_path / "not" / "there") in found.found


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(resources.os, "access", lambda path, mode: path != tmp_path)
    found = by_name(resources.check_resources())["disk of Triton's kernels (TRITON_CACHE_DIR)"]
    assert found.status == "fail" and "cannot be written" in found.found


def test_shared_memory_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 64 << 20))
    found = by_name(resources.check_resources())["shared memory"]
    assert found.status == "note" and "--shm-size" in found.found


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(machine, "DRIVERS", {str(tmp_path / "kfd"): "AMD", str(tmp_path / "none"): "NVIDIA"})
    monkeypatch.setattr(machine.device, "arch", lambda: "cpu")
    found = by_name(machine.check_machine())["device driver"]
    assert found.status == "fail" and "built for AMD" in found.remedy


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory, an architecture that nobody tried, and one that was compiled for."""
    properties = namedtuple("Properties", "name")("AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((190, 100)[index] * GIB, 192 * GIB))
    monkeypatch.setattr(machine.device, "arch", lambda: "gfx942")
    found = by_name(machine.check_machine())
    assert found["device"].status == "ok" and found["device 0"].status == "ok"
    assert found["device 1"].status == "note" and "100.0 of 192.0 GiB free" in found["device 1"].found
    monkeypatch.setattr(machine.device, "arch", lambda: "gfx1100")
    assert by_name(machine.check_machine())["device"].status == "note"


def test_an_op_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES["store_kv"]
    monkeypatch.setattr(table, "kernels", table.kernels[:1])
    found = by_name(rows.check_rows("cpu"))["op store_kv"]
    assert found.status == "fail" and found.details == (
        "aiter_reshape_and_cache_flash: does not run: runs on gfx942 and gfx950, this is cpu; AITER is not installed",
    )


def test_forced_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_PLUGIN_KERNELS", "store_kv=fast")
    assert "names the row store_kv=fast" in by_name(rows.check_rows("cpu"))["forced rows"].found


@pytest.mark.parametrize(
    ("status", "said", "arch", "remedy"),
    [
        (1, "RuntimeError: x", "cpu", "pip uninstall amd-aiter: this machine (cpu) has no ROCm"),
        (-6, "signal 6", "gfx942", "install an AITER that was built for this ROCm"),
    ],
)
def test_an_aiter_that_cannot_be_imported(
    status: int, said: str, arch: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiter, "_import", lambda: (status, said))
    found = aiter._import_finding("amd-aiter 1", arch)
    assert found.status == "fail" and said in found.found and remedy in found.remedy


def test_how_an_import_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    endings = {
        "import os; os.abort()": "signal 6",
        "raise ValueError('no')": "ValueError: no",
        "raise SystemExit(3)": "it said nothing",
    }
    for program, said in endings.items():
        monkeypatch.setattr(aiter, "_PROGRAM", program)
        status, text = aiter._import()
        assert status != 0 and said in text
    monkeypatch.setattr(aiter, "_PROGRAM", "import time; time.sleep(9)")
    monkeypatch.setattr(aiter, "IMPORT_LIMIT", 0.5)
    assert aiter._import() == (1, "it did not end within 0.5 seconds")


def test_registration_finds_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that another plugin took off, a model that cannot be imported, a backend that SGLang does not know."""
    from atom_plugin import hooks, resolve

    whole = registration.check_registration(aiter_breaks_imports=False)
    assert {finding.status for finding in whole} == {"ok"}, whole
    monkeypatch.setattr(hooks, "is_applied", lambda row: "get_device" not in row.target)
    monkeypatch.setitem(resolve.CLASSES, ("Qwen3ForCausalLM", "qwen3"), "atom_plugin.models.absent:Qwen3")
    monkeypatch.setattr(host, "why_backend_is_unknown", lambda name: ["no scheduler can build the backend atom"])
    found = by_name(registration.check_registration(aiter_breaks_imports=False))
    lost = {name for name, finding in found.items() if finding.status == "fail"}
    assert lost == {"hook sglang.srt.utils.common.get_device", "model Qwen3ForCausalLM (qwen3)", "attention backend"}


def test_an_sglang_that_does_not_call_us(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_plugin import register

    monkeypatch.setattr(register, "loaded", False)
    monkeypatch.setattr(sys.modules["sglang.srt.plugins"], "load_plugins", lambda: None)
    assert registration._loaded_by_sglang().status == "fail"


def test_a_finding_that_fails_has_a_remedy() -> None:
    with pytest.raises(ValueError, match="a fail has a remedy"):
        Finding("x", "bad", status="fail")
    with pytest.raises(ValueError, match="a fail has a remedy"):
        Finding("x", "fine", remedy="mend it")
