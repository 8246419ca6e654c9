"""``activate`` answers only where SGLang finds no platform, and ``why_inactive`` says what is in the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sglang.srt import platforms as sglang_platforms

from atom_plugin import platform

ACCELERATORS = {
    "CUDA": [(torch.version, "hip", None), (torch.cuda, "is_available", lambda: True)],
    "ROCm": [(torch.version, "hip", "7.0"), (torch.cuda, "is_available", lambda: True)],
    "XPU": [(torch.xpu, "is_available", lambda: True)],
    "NPU": [(torch, "npu", torch.xpu), (torch.xpu, "is_available", lambda: True)],
    "MUSA": [(torch.version, "musa", "4.0")],
    "MPS": [(torch.mps, "is_available", lambda: True)],
}


def test_activates_on_a_bare_machine() -> None:
    assert platform.why_inactive() == ""
    assert platform.activate() == platform.PLATFORM_CLASS


@pytest.mark.parametrize("name", ACCELERATORS)
def test_leaves_accelerators_to_sglang(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, value in ACCELERATORS[name]:
        monkeypatch.setattr(owner, attribute, value, raising=False)
    assert platform.activate() is None
    assert name in platform.why_inactive()
    assert "SGLang serves" in platform.why_inactive()


def test_knows_every_platform_that_sglang_has() -> None:
    probes = {name.removeprefix("_is_").removesuffix("_available").upper() for name in vars(sglang_platforms)}
    in_tree = {name for name in probes if f"_is_{name.lower()}_available" in vars(sglang_platforms)}
    # SAIL reports itself through torch.cuda; CPU is SGLANG_USE_CPU_ENGINE
    assert in_tree - {"SAIL", "CPU"} <= {name.upper() for name in platform.ACCELERATORS}


@pytest.mark.parametrize("value", ["1", "0", "", "true", "True", "yes"])
def test_reads_the_cpu_engine_variable_as_sglang_does(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", value)
    assert (platform.activate() is None) == sglang_platforms._is_cpu_available()


def test_cpu_engine_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.why_inactive() == "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine: unset it to use ours."


def test_second_plugin_is_left_the_machine(
    second_platform: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(second_platform("second", "None"))
    assert platform.activate() is None
    assert platform.why_inactive() == (
        "another SGLang platform plugin is installed (other of other), and this machine is left to it: "
        "set SGLANG_PLATFORM=atom_cpu to serve on the CPU instead."
    )


@pytest.mark.parametrize("variables", [{"SGLANG_PLATFORM": "atom_cpu"}, {"SGLANG_PLUGINS": "atom, atom_cpu"}])
def test_second_plugin_that_sglang_does_not_load_is_no_reason(
    variables: dict[str, str], second_platform: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(second_platform("second", "None"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert platform.activate() == platform.PLATFORM_CLASS


def test_another_platform_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    assert platform.activate() is None
    assert platform.why_inactive() == (
        "SGLANG_PLATFORM=other selects another platform: unset it, or set SGLANG_PLATFORM=atom_cpu."
    )


@pytest.mark.parametrize(
    ("owner", "attribute", "reason"),
    [(torch.cuda, "is_available", "SGLang serves CUDA on this machine"), (None, "", "SGLANG_USE_CPU_ENGINE=1 selects")],
)
def test_selected_by_name_where_it_cannot_serve(
    owner: object, attribute: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "atom_cpu")
    if owner is None:
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    else:
        monkeypatch.setattr(owner, attribute, lambda: True)
    with pytest.raises(RuntimeError, match=f"SGLANG_PLATFORM=atom_cpu asks for .*{reason}"):
        platform.activate()


def test_left_out_by_the_plugin_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "atom")
    assert platform.why_inactive() == (
        "SGLANG_PLUGINS=atom leaves atom_cpu out: set SGLANG_PLUGINS=atom,atom_cpu, or unset it."
    )


def test_missing_platform_is_named_where_sglang_finds_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(device_id: int | None = None) -> str:
        raise RuntimeError("No accelerator is available.")

    with pytest.raises(RuntimeError, match=r"^No accelerator is available\.$"):
        platform.DEVICE.hook(no_device)
    monkeypatch.setenv("SGLANG_PLUGINS", "atom")
    with pytest.raises(RuntimeError, match=r"has a platform for CPUs .*SGLANG_PLUGINS=atom leaves atom_cpu out"):
        platform.DEVICE.hook(no_device, None)


def test_cpu_launch_without_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: False)
    monkeypatch.setenv("SGLANG_PLUGINS", "atom")
    assert platform.why_not_device("cpu") == [
        "--device cpu: the CPU platform of atom-plugin (atom_cpu) is not in use: "
        "SGLANG_PLUGINS=atom leaves atom_cpu out: set SGLANG_PLUGINS=atom,atom_cpu, or unset it."
    ]
    assert platform.why_not_device("cuda") == []
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.why_not_device("cpu") == []
