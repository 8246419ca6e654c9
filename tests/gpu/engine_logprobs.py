"""Starts one sglang.Engine with the flags of standard input and prints teacher-forced and decoded logprobs as JSON.

The job: ``engine`` flags, ``ids`` to score, ``continued`` ones that are decoded greedily for ``new_tokens`` (those of
``ids`` without it), ``tails`` after cached prefixes, and ``repeated``, a prompt that is asked often; with it
all ``continued`` are decoded once more without logprobs.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def values(entries: list[Any]) -> list[float]:
    """Return the logprobs of SGLang's (logprob, token, text) entries, without the first, which has none."""
    return [entry[0] for entry in entries if entry[0] is not None]


def score(engine: Any, ids: list[list[int]]) -> list[list[float]]:
    """Return, teacher-forced, the logprob of every token but the first."""
    answers = engine.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    return [values(one["meta_info"]["input_token_logprobs"]) for one in answers]


def decode(engine: Any, ids: list[list[int]], new_tokens: int) -> list[Any]:
    """Return greedy answers, their logprobs and the five likeliest tokens of each step."""
    answers: list[Any] = engine.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=5,
    )
    return answers


def decoded_logprobs(answer: Any) -> list[float]:
    """Return the logprobs of one answer."""
    return values(answer["meta_info"]["output_token_logprobs"])


def score_tail(engine: Any, cached: int, ids: list[int], page_size: int) -> list[float]:
    """Return the logprobs after a prefix of ``cached`` tokens, all whole pages of which come from the radix cache."""
    engine.generate(input_ids=ids[:cached], sampling_params={"temperature": 0, "max_new_tokens": 1})
    answer = engine.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=cached,
    )
    assert answer["meta_info"]["cached_tokens"] == cached - cached % page_size, answer["meta_info"]
    return values(answer["meta_info"]["input_token_logprobs"])


def without_logprobs(engine: Any, ids: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Return greedy tokens; SGLang mixes decode steps into chunks of prefill only where nobody wants logprobs."""
    engine.flush_cache()
    answers = engine.generate(
        input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    )
    return [one["output_ids"] for one in answers]


def repeat(engine: Any, ids: list[int], times: int) -> dict[str, Any]:
    """Return the answers' logprobs of one prompt asked ``times`` at once, and 3 times alone, nothing of it cached."""
    engine.flush_cache()
    at_once = decode(engine, [ids] * times, 16)
    alone = []
    for _ in range(3):
        engine.flush_cache()
        alone += decode(engine, [ids], 16)
    return {
        "at_once": [decoded_logprobs(one) for one in at_once],
        "alone": [decoded_logprobs(one) for one in alone],
        "tokens": [[entry[1] for entry in one["meta_info"]["output_token_logprobs"]] for one in (*at_once, *alone)],
    }


def main() -> None:
    """Run the engine once: score every sequence, continue some greedily, then score tails after cached prefixes."""
    import sglang

    body = json.load(sys.stdin)
    engine = sglang.Engine(**body["engine"])
    continued, page_size = body.get("continued", body["ids"]), body["engine"].get("page_size", 1)
    scored = score(engine, body["ids"])
    decoded = decode(engine, continued, body["new_tokens"])
    result = {
        "scored": scored,
        "decoded": [decoded_logprobs(one) for one in decoded],
        "tokens": [[entry[1] for entry in one["meta_info"]["output_token_logprobs"]] for one in decoded],
        "likeliest": [
            [[entry[:2] for entry in step] for step in one["meta_info"]["output_top_logprobs"]] for one in decoded
        ],
        "tails": [score_tail(engine, one["cached"], one["ids"], page_size) for one in body["tails"]],
    }
    if "repeated" in body:
        result["repeated"] = repeat(engine, body["repeated"], 20)
        result["plain"] = without_logprobs(engine, continued, body["new_tokens"])
    print("RESULT" + json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
