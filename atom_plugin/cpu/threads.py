"""Which cores each rank computes on, where several ranks share one machine's CPU."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)

#: SGLang's variable: the cores of each rank, ``0-3|4-7``; SGLang refuses more ranks than NUMA nodes without it.
BIND = "SGLANG_CPU_OMP_THREADS_BIND"

_set_by_us: str | None = None


def give_every_rank_its_cores(*, num_ranks: int) -> None:
    """Split our cores evenly with SGLANG_CPU_OMP_THREADS_BIND, where SGLang demands it and the user set nothing."""
    from sglang.srt.utils.common import get_cpu_ids_by_node

    global _set_by_us
    if os.environ.get(BIND) == _set_by_us:  # what an earlier launch of this process needed
        os.environ.pop(BIND, None)
    num_nodes = len(get_cpu_ids_by_node())
    if BIND in os.environ or num_ranks <= num_nodes:
        return
    cores = sorted(os.sched_getaffinity(0))
    _set_by_us = os.environ[BIND] = "|".join(",".join(map(str, group)) for group in split_cores(cores, num_ranks))
    logger.warning(
        "%d ranks share %d NUMA node(s) and %s is not set: set to %s.", num_ranks, num_nodes, BIND, _set_by_us
    )


def split_cores(cores: list[int], num_ranks: int) -> list[list[int]]:
    """Return one group of neighbouring cores a rank, as even as can be; ranks beyond the cores share them in turn."""
    if num_ranks >= len(cores):
        return [[cores[rank % len(cores)]] for rank in range(num_ranks)]
    return [cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks] for rank in range(num_ranks)]


def limit_threads() -> None:
    """Give PyTorch as many threads as the smallest group of SGLANG_CPU_OMP_THREADS_BIND has cores.

    SGLang reads the groups but binds threads only with its own CPU build; without a limit every rank starts a thread
    on every core. OMP_NUM_THREADS has the last word.
    """
    if BIND in os.environ and os.environ[BIND] != "all" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(num_cores(group) for group in os.environ[BIND].split("|")))


def num_cores(group: str) -> int:
    """Return how many cores ``group`` names, e.g. 5 for ``0-3,8``."""
    spans = [span.partition("-") for span in group.split(",")]
    return sum(int(last) - int(first) + 1 if dash else 1 for first, dash, last in spans)
