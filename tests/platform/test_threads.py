"""Ranks that share a machine get disjoint cores, and the user's own choice stands."""

from __future__ import annotations

import os

import pytest
import torch
from sglang.srt.utils import common

from atom_plugin.cpu import threads


@pytest.fixture(autouse=True)
def one_node_of_eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(common, "get_cpu_ids_by_node", lambda: ["0,1,2,3,4,5,6,7"])
    monkeypatch.setattr(threads, "_set_by_us", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "groups"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [1], [0], [1]]),
    ],
)
def test_split(num_cores: int, num_ranks: int, groups: list[list[int]]) -> None:
    assert threads.split_cores(list(range(num_cores)), num_ranks) == groups


def test_default_is_set_aloud(caplog: pytest.LogCaptureFixture) -> None:
    threads.give_every_rank_its_cores(num_ranks=2)
    assert os.environ.pop(threads.BIND) == "0,1,2,3|4,5,6,7"
    assert "2 ranks share 1 NUMA node(s) and SGLANG_CPU_OMP_THREADS_BIND is not set: set to 0,1,2,3|4,5,6,7." in (
        caplog.text
    )


def test_next_launch_starts_afresh() -> None:
    threads.give_every_rank_its_cores(num_ranks=2)
    threads.give_every_rank_its_cores(num_ranks=4)
    assert os.environ[threads.BIND] == "0,1|2,3|4,5|6,7"
    threads.give_every_rank_its_cores(num_ranks=1)
    assert threads.BIND not in os.environ


def test_choice_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(threads.BIND, "0|1")
    threads.give_every_rank_its_cores(num_ranks=2)
    assert os.environ[threads.BIND] == "0|1"


def test_sglang_needs_the_variable() -> None:
    """Fails once SGLang takes more ranks than NUMA nodes without it."""
    from sglang.srt.utils import numa_utils

    names = {"numa_index", "world_size"} & set(numa_utils.init_threads_binding.__kwdefaults__ or {})
    assert not names
    keywords = numa_utils.init_threads_binding.__code__.co_varnames[:2]
    with pytest.raises(AssertionError, match=threads.BIND):
        numa_utils.init_threads_binding(**dict(zip(keywords, (1, 99), strict=True)))


@pytest.mark.parametrize(("bind", "expected"), [("0-3,8|4-7", 4), ("0|1,2", 1), ("all", None), (None, None)])
def test_threads_follow_the_smallest_group(
    bind: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    if bind is not None:
        monkeypatch.setenv(threads.BIND, bind)
    threads.limit_threads()
    assert asked == ([] if expected is None else [expected])
