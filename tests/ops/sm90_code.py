"""Compiles the MLA launches for an NVIDIA H200 without one; prints (call, kernel, stack bytes, shared bytes) as JSON.

    python -m tests.ops.sm90_code

The reduction is launched while the splits run: ``early`` says what its PTX does before it waits for them.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from tests.ops.machine_code import Launch, mla_attention_calls, recorded, source_of


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of a thread's stack, where registers are spilled to."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", printed)))


def before_the_wait(ptx: str) -> dict[str, int] | None:
    """Return how many loads, stores and returns stand before griddepcontrol.wait, None where nothing waits."""
    head, wait, _ = ptx.partition("griddepcontrol.wait")
    counted = {"loads": r"ld\.global", "stores": r"st\.global", "returns": r"\bret;"}
    return {name: len(re.findall(pattern, head)) for name, pattern in counted.items()} if wait else None


def compiled(call: str, launch: Launch) -> dict[str, Any]:
    """Return what is printed of one launch."""
    options = {name: value for name, value in launch.options.items() if name in ("num_warps", "num_stages")}
    code = triton.compile(source_of(launch), target=GPUTarget("cuda", 90, 32), options=options)
    return {
        "call": call,
        "kernel": launch.kernel.__name__,
        "stack": stack_bytes(code.asm["cubin"]),
        "shared": code.metadata.shared,
        "early": before_the_wait(code.asm["ptx"]),
        "launches_dependents": "griddepcontrol.launch_dependents" in code.asm["ptx"],
        "launch_pdl": bool(launch.arguments.get("launch_pdl", False)),
    }


def main() -> None:
    """Compile and print."""
    from atom_plugin.ops.mla_attention import kernel

    found = []
    for name, call in mla_attention_calls("sm90").items():
        with recorded(kernel, "sm90") as launches:
            call()
        found += [compiled(name, launch) for launch in launches]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
