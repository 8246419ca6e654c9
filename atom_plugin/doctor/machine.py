"""What machine this is: its architecture, its devices and their memory, and which platform SGLang would run on."""

from __future__ import annotations

from pathlib import Path

import torch

from atom_plugin import device, platform
from atom_plugin.doctor.finding import Finding, fail, note

#: What the kernels are written for: run on, or compiled for.
RUN_ON, COMPILED_FOR = ("sm90", "cpu"), ("gfx942", "gfx950")
GIB = 1 << 30
#: Device files of drivers, and which torch sees the devices behind them.
DRIVERS = {"/dev/kfd": "AMD", "/dev/nvidiactl": "NVIDIA"}
#: Share of a device's memory that others hold before it is worth a word: SGLang counts on nearly all of it.
_BUSY = 0.05


def check_machine() -> list[Finding]:
    """Return the architecture, the devices, and the platform of SGLang."""
    arch = device.arch()
    build = f"torch for {_build()}"
    if arch in RUN_ON or arch in COMPILED_FOR:
        findings = [Finding("device", f"{arch}, {build}")]
    else:
        known = ", ".join((*RUN_ON, *COMPILED_FOR))
        findings = [note("device", f"{arch}, {build}: nothing of ours was run or compiled for it; {known} are known")]
    if arch == "cpu":
        findings += _drivers_without_devices()
    else:
        findings += [_memory(index) for index in range(torch.cuda.device_count())]
    why = platform.why_inactive()
    return [*findings, Finding("CPU platform", f"not used: {why}" if why else "serves here: no accelerator was found")]


def _build() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda is not None else "CPUs alone"


def _drivers_without_devices() -> list[Finding]:
    """Return the drivers of GPUs that this machine has and that torch does not see."""
    found = [(file, vendor) for file, vendor in DRIVERS.items() if Path(file).exists()]
    return [
        fail(
            "device driver",
            f"{file} is there, and torch for {_build()} sees no device",
            f"install the torch that was built for {vendor}, or look at the driver and at HIP_VISIBLE_DEVICES, "
            f"ROCR_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES; to serve on the CPU set them all to -1",
        )
        for file, vendor in found
    ]


def _memory(index: int) -> Finding:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    text = f"{properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < (1 - _BUSY) * total:
        return note(f"device {index}", f"{text}: other processes hold some of it")
    return Finding(f"device {index}", text)
