"""Two gloo ranks run SGLang's process groups without the CPU rows, then with them; run by test_groups.py.

Usage: two_ranks.py PORT. Rank 0 prints a JSON object: name of the row -> the error without it, or null for none; and
``with all``: what gather and scatter give.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.multiprocessing


def error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


def main(rank: int, port: str) -> None:
    from sglang.srt.distributed import parallel_state

    from atom_plugin import hooks
    from atom_plugin.cpu import install

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
    gathered, own = torch.empty(2), torch.empty(1)

    def build() -> parallel_state.GroupCoordinator:
        return parallel_state.init_model_parallel_group([[0, 1]], rank, "gloo", group_name="tp")

    def gather() -> None:
        group.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))

    def scatter() -> None:
        group.reduce_scatter_tensor(own, torch.tensor([1.0, 10.0]) * (rank + 1))

    found: dict[str, object] = {"GROUPS": error_of(build)}
    hooks.install([install.GROUPS])
    group = build()
    found["GATHER"], found["SCATTER"] = error_of(gather), error_of(scatter)
    hooks.install([install.GATHER, install.SCATTER])
    gather()
    scatter()
    found["with all"] = [gathered.tolist(), own.tolist()]
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(sys.argv[1],), nprocs=2)
