"""Times decode steps of one implementation in one process: SGLang's own model runner and graphs, no scheduler.

Reads a job as JSON from standard input and prints "RESULT" and the figures as JSON; see ``main``. It is what
``sglang.benchmark.one_batch`` does, but with SGLang's plugins loaded, with cached contexts that are not computed, and
with tokens drawn anew for every step, so that a batch does not agree on one token and so on its experts.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from array import array
from typing import Any

import torch

#: New tokens of a request; all before them is taken for cached. A page of the largest size that is measured.
NEW_TOKENS = 64
STEPS, WARM_UP = 100, 10


def load(engine: dict[str, Any]) -> Any:
    """Return one_batch's runner of a launch with the flags ``engine``, on the first GPU."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()  # after the import above, by which a plugin sees that this process builds a model
    server_args = ServerArgs(**engine)
    one_batch._set_envs_and_config(server_args)
    one_batch.initialize_moe_config(server_args)
    one_batch.initialize_fp8_gemm_config(server_args)
    one_batch.initialize_fp4_gemm_config(server_args)
    one_batch.configure_logger(server_args, prefix="")
    one_batch.get_tokenizer = lambda *_arguments, **_options: None
    runner, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    return runner


def fill_cache(runner: Any) -> None:
    """Put normal numbers into the KV pool, whose contents stand for contexts that were computed before."""
    pool = runner.torch_runner.token_to_kv_pool
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]
    for buffer in buffers:
        is_fp8 = buffer.dtype == torch.uint8
        for rows in buffer.split(1 << 16):
            drawn = torch.randn(rows.shape, dtype=torch.bfloat16, device=rows.device)
            rows.copy_(drawn.to(torch.float8_e4m3fn).view(torch.uint8) if is_fp8 else drawn)


def requests(runner: Any, batch_size: int, context: int, vocab_size: int, *, cached: int) -> list[Any]:
    """Return requests of ``context`` tokens of which the first ``cached`` are in the pool."""
    from sglang.benchmark.one_batch import Req, SamplingParams

    draw = random.Random(0)
    made = []
    for number in range(batch_size):
        ids = array("q", [draw.randrange(vocab_size) for _ in range(context)])
        req = Req(
            rid=str(number),
            origin_input_text="",
            origin_input_ids=ids,
            sampling_params=SamplingParams(temperature=0, max_new_tokens=STEPS + WARM_UP + 8),
        )
        req.full_untruncated_fill_ids = ids
        req.logprob_start_len = -1
        if cached:
            req.prefix_indices = runner.torch_runner.token_to_kv_pool_allocator.alloc(cached)
        req.set_extend_range(cached, context)
        made.append(req)
    return made


class Decoder:
    """A batch that stands after its prefill; ``step`` decodes one drawn token a request and waits for the GPU."""

    def __init__(self, runner: Any, batch_size: int, context: int, vocab_size: int) -> None:
        runner.clear()
        self._runner = runner
        self._shape = (batch_size,)
        self._vocab_size = vocab_size
        _, _, self._batch = runner.extend(
            requests(runner, batch_size, context, vocab_size, cached=context - NEW_TOKENS)
        )

    def step(self) -> float:
        """Return the seconds of one step."""
        ids = torch.randint(self._vocab_size, self._shape, device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._runner.decode(ids, self._batch)
        torch.cuda.synchronize()
        return time.perf_counter() - start


def graph_us(runner: Any, rounds: int = 30) -> float:
    """Return the microseconds of the graph that was replayed last: the median of replays, one at a time."""
    graphs = runner.torch_runner.decode_cuda_graph_runner
    spent = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graphs.backend.replay(graphs._replay_graph_key, None)
        end.record()
        end.synchronize()
        spent.append(1e3 * start.elapsed_time(end))
    return statistics.median(spent)


class Prefill:
    """Prompts of ``context`` tokens, nothing of them cached; ``step`` computes them and waits for the GPU."""

    def __init__(self, runner: Any, batch_size: int, context: int, vocab_size: int) -> None:
        self._runner = runner
        self._shape = (batch_size, context, vocab_size)

    def step(self) -> float:
        """Return the seconds of one prefill, the scheduler's work left out."""
        self._runner.clear()
        made = requests(self._runner, *self._shape, cached=0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._runner.extend(made)
        torch.cuda.synchronize()
        return time.perf_counter() - start


def kernels_of(decoder: Decoder | Prefill, steps: int = 4) -> list[tuple[str, float, float]]:
    """Return (kernel, us a step, calls a step), the longest first; kernels that run beside others count in full."""
    from torch.profiler import ProfilerActivity, profile

    sums: dict[str, list[float]] = {}
    for _ in range(steps):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            decoder.step()
        events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        for event in events:
            entry = sums.setdefault(event.name, [0.0, 0.0])
            entry[0] += (event.time_range.end - event.time_range.start) / steps
            entry[1] += 1 / steps
    return sorted(((name, us, calls) for name, (us, calls) in sums.items()), key=lambda row: -row[1])


def decode_rows(runner: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of the job's decode cells."""
    rows = []
    for batch_size, context in job["cells"]:
        decoder = Decoder(runner, batch_size, context, job["vocab_size"])
        spent = [decoder.step() for _ in range(WARM_UP + STEPS)][WARM_UP:]
        rows.append(
            {
                "batch": batch_size,
                "context": context,
                "step_us": 1e6 * statistics.median(spent),
                "graph_us": graph_us(runner),
                "kernels": kernels_of(decoder) if [batch_size, context] in job["profile"] else [],
            }
        )
    return rows


def prefill_rows(runner: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of the job's prefill cells, whose kernels are all profiled."""
    rows = []
    for batch_size, context in job["prefill"]:
        prefill = Prefill(runner, batch_size, context, job["vocab_size"])
        spent = [prefill.step() for _ in range(2 + 5)][2:]
        rows.append(
            {
                "batch": batch_size,
                "context": context,
                "step_us": 1e6 * statistics.median(spent),
                "kernels": kernels_of(prefill, steps=1),
            }
        )
    return rows


def main() -> None:
    """Run {"engine": flags, "cells": [[batch, context]], "prefill": ..., "vocab_size": n, "profile": [...]}."""
    job = json.load(sys.stdin)
    runner = load(job["engine"])
    fill_cache(runner)
    figures = {
        "decode": decode_rows(runner, job),
        "prefill": prefill_rows(runner, job),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    print("RESULT" + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
