"""Starts one sglang.Engine with the flags of standard input and prints its greedy answers to batches as JSON.

After the batches each answer of the last one is continued: its prompt, its tokens and ``tail`` are asked, so that what
decoding or verifying has left in the cache is read again.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def ask(engine: Any, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """Return for each prompt of a batch its token ids, the answer's, and what SGLang says of cache and speculation."""
    answers = engine.generate(
        input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    )
    return [
        {
            "ids": ids,
            "tokens": answer["output_ids"],
            "cached": answer["meta_info"]["cached_tokens"],
            "steps": answer["meta_info"].get("spec_verify_ct"),
        }
        for ids, answer in zip(prompts, answers, strict=True)
    ]


def main() -> None:
    """Run the engine once."""
    import sglang

    body = json.load(sys.stdin)
    engine = sglang.Engine(**body["engine"])
    batches = [ask(engine, batch, body["new_tokens"]) for batch in body["batches"]]
    continued = [one["ids"] + one["tokens"] + body["tail"] for one in batches[-1]]
    batches.append(ask(engine, continued, body["new_tokens"]))
    print("RESULT" + json.dumps(batches), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
