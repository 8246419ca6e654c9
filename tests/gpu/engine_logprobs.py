"""Starts one sglang.Engine with the flags of standard input and prints teacher-forced and decoded logprobs as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any


def values(entries: list[Any]) -> list[float]:
    """Return the logprobs of SGLang's (logprob, token, text) entries, without the first, which has none."""
    return [entry[0] for entry in entries if entry[0] is not None]


def main() -> None:
    """Run the engine once: score every sequence, continue each greedily, then score tails after cached prefixes."""
    import sglang

    body = json.load(sys.stdin)
    engine = sglang.Engine(**body["engine"])
    scored = engine.generate(
        input_ids=body["ids"],
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    decoded = engine.generate(
        input_ids=body["ids"],
        sampling_params={"temperature": 0, "max_new_tokens": body["new_tokens"], "ignore_eos": True},
        return_logprob=True,
    )
    tails = []
    for tail in body["tails"]:
        cached, ids = tail["cached"], tail["ids"]
        engine.generate(input_ids=ids[:cached], sampling_params={"temperature": 0, "max_new_tokens": 1})
        answer = engine.generate(
            input_ids=ids,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=cached,
        )
        whole_pages = cached - cached % body["engine"].get("page_size", 1)
        assert answer["meta_info"]["cached_tokens"] == whole_pages, answer["meta_info"]
        tails.append(values(answer["meta_info"]["input_token_logprobs"]))
    result = {
        "scored": [values(one["meta_info"]["input_token_logprobs"]) for one in scored],
        "decoded": [values(one["meta_info"]["output_token_logprobs"]) for one in decoded],
        "tails": tails,
        "tokens": [[entry[1] for entry in one["meta_info"]["output_token_logprobs"]] for one in decoded],
    }
    print("RESULT" + json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
