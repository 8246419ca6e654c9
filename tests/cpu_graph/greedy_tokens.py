"""Greedy tokens of one checkpoint under several attention backends; run by test_decode_graph.py.

Usage: greedy_tokens.py MODEL JSON, where JSON is a list of [backend, path of the graph report, or null for no graph].
Prints a JSON list of [tokens of each prompt] in that order, as the last line.
"""

from __future__ import annotations

import json
import os
import sys

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], list(range(20, 50))]


def tokens(model: str, backend: str) -> list[list[int]]:
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        dtype="float32",
        attention_backend=backend,
        max_total_tokens=4096,
        mem_fraction_static=0.1,
        max_running_requests=4,
        cuda_graph_max_bs_decode=4,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        log_level="warning",
    )
    try:
        answers = engine.generate(input_ids=PROMPTS, sampling_params={"temperature": 0, "max_new_tokens": 24})
        return [answer["output_ids"] for answer in answers]
    finally:
        engine.shutdown()


if __name__ == "__main__":
    runs = []
    for backend, report in json.loads(sys.argv[2]):
        os.environ.pop("CPU_GRAPH_REPORT", None)
        if report:
            os.environ["CPU_GRAPH_REPORT"] = report
        runs.append(tokens(sys.argv[1], backend))
    print(json.dumps(runs))
