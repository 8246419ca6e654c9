"""The first problems of a GSM8K file as completions to both implementations: do tokens and logprobs agree?

    python benchmarks/gsm8k_completions.py gsm8k_test.jsonl [--count 200] [--dtype float32]

Starts SGLang's model on torch_native, then ours on our backend, on the committed checkpoint; both give greedy
completions with logprobs. Prints how many tokens differ, the largest difference of a logprob up to the first token
that differs in each answer, and that of the prompts. (The checkpoint was trained on other problems: its answers are
wrong, and broad distributions make the comparison sharp.)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu_decode import MODEL, VARIANTS

NEW_TOKENS = 64


def child(flags: dict[str, str], prompts: list[str]) -> None:
    """Run one engine and print [(prompt logprobs, tokens, token logprobs)] of every prompt."""
    import sglang

    engine = sglang.Engine(
        model_path=str(MODEL), device="cpu", max_total_tokens=32768, mem_fraction_static=0.2, **flags
    )
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answers = engine.generate(prompt=prompts, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
    found = [
        (
            [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][1:],
            [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]],
            [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
        )
        for answer in answers
    ]
    print("FOUND" + json.dumps(found), flush=True)
    engine.shutdown()


def run(flags: dict[str, str], prompts: list[str]) -> list[Any]:
    """Run one implementation in a process of its own."""
    ran = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(flags)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if "FOUND" not in ran.stdout:
        raise RuntimeError(f"{flags} failed:\n{ran.stderr[-3000:]}")
    return json.loads(ran.stdout.rsplit("FOUND", 1)[1])


def compare(own: list[Any], ours: list[Any]) -> str:
    """Return the figures in words."""
    prompt_tokens = sum(len(one[0]) for one in own)
    prompt_largest = max(abs(a - b) for x, y in zip(own, ours, strict=True) for a, b in zip(x[0], y[0], strict=True))
    differ, largest, compared, diverged = 0, 0.0, 0, 0
    for (_, own_tokens, own_logprobs), (_, our_tokens, our_logprobs) in zip(own, ours, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(own_tokens, our_tokens, strict=True)) if a != b), len(own_tokens))
        diverged += same < len(own_tokens)
        differ += sum(a != b for a, b in zip(own_tokens, our_tokens, strict=True))
        compared += same
        largest = max([largest, *(abs(a - b) for a, b in zip(own_logprobs[:same], our_logprobs[:same], strict=True))])
    total = sum(len(one[1]) for one in own)
    return (
        f"{len(own)} completions: {differ} of {total} greedy tokens differ ({diverged} answers diverge); "
        f"largest logprob difference {largest:.2e} over {compared} tokens before a divergence, "
        f"{prompt_largest:.2e} over {prompt_tokens} prompt tokens"
    )


def main() -> None:
    """Run both implementations on the same prompts and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, nargs="?", help="JSON lines with a field `question`")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child), json.load(sys.stdin))
        return
    if arguments.dataset is None:
        parser.error("a dataset is needed")
    lines = arguments.dataset.read_text().splitlines()[: arguments.count]
    prompts = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]
    results = [run({**flags, "dtype": arguments.dtype}, prompts) for flags in VARIANTS.values()]
    print(f"{' against '.join(VARIANTS)}, {arguments.dtype}: {compare(*results)}")


if __name__ == "__main__":
    main()
