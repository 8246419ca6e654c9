"""Times of GPU kernels: replays of a captured graph, so that no launch from Python is in them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

#: More than any L2 cache that we meet: inputs rotate through at least this much.
COLD_BYTES = 512 << 20


def graph_us(calls: Sequence[Callable[[], object]], *, rounds: int = 12) -> float:
    """Return microseconds a call: the median over replays of one graph that makes all ``calls`` in turn.

    The calls should differ in their inputs, which together exceed the cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    spans = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(1e3 * start.elapsed_time(end) / len(calls))
    return statistics.median(spans)


def read_bandwidth() -> float:
    """Return bytes a second of reading 4 GB once, measured here."""
    source = torch.randn(1 << 30, device="cuda")
    return source.numel() * 4 / (1e-6 * graph_us([lambda: source.sum()] * 2))
