"""SGLang's few-shot GSM8K benchmark against one server, in a process of its own: ``python -m ... SPEC.json``.

Its four figures are what SGLang's developers quote. It keeps no outcome of a single problem, which a paired test
needs: those are read from the answers that it dumps, by its own functions, and must give the accuracy that it printed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atom_plugin.compare.state import write_whole

#: Where the benchmark writes its answers, in the folder that it runs in.
DUMP = "tmp_output_gsm8k.txt"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is asked of the server at ``host`` and ``port``: fields as ``recipe.Accuracy``."""

    host: str
    port: int
    data: str
    num_fewshot: int
    limit: int
    concurrency: int
    max_tokens: int
    result: str


def run(spec: Spec) -> dict[str, Any]:
    """Return the benchmark's figures and the outcome of each problem; ValueError where the two disagree."""
    from sglang.test.few_shot_gsm8k import run_eval

    arguments = argparse.Namespace(
        num_shots=spec.num_fewshot,
        data_path=spec.data,
        num_questions=spec.limit,
        max_new_tokens=spec.max_tokens,
        parallel=spec.concurrency,
        host=spec.host,
        port=spec.port,
        temperature=0.0,
    )
    found = {name: float(value) for name, value in run_eval(arguments).items()}
    right = outcomes(Path(DUMP).read_text(), spec)
    if abs(sum(right) / len(right) - found["accuracy"]) > 1e-9:
        raise ValueError(f"the answers in {DUMP} are {sum(right)} of {len(right)} right, it says {found['accuracy']}")
    return {"harness": "sglang", "num_fewshot": spec.num_fewshot, **found, "outcomes": right}


def outcomes(dump: str, spec: Spec) -> list[int]:
    """Return, for each problem in the benchmark's dump, 1 where its answer is right and 0 where it is not."""
    from sglang.test.few_shot_gsm8k import get_answer_value, get_few_shot_examples, get_one_example
    from sglang.utils import read_jsonl

    lines = list(read_jsonl(spec.data))
    shown = get_few_shot_examples(lines, spec.num_fewshot)
    texts = re.split(rf"^{'=' * 40} \d+ {'=' * 40}\n", dump, flags=re.MULTILINE)[1:]
    right = []
    for index, text in enumerate(texts):
        prompt = shown + get_one_example(lines, index, False)
        if not text.startswith(prompt):
            raise ValueError(f"answer {index} in {DUMP} does not begin with its prompt")
        answer = text[len(prompt) :].removesuffix(f"\n{'=' * 80}\n\n")
        right.append(int(get_answer_value(answer) == get_answer_value(lines[index]["answer"])))
    return right


def main(path: str) -> None:
    """Run what a spec asks and write its result."""
    spec = Spec(**json.loads(Path(path).read_text()))
    write_whole(Path(spec.result), json.dumps(run(spec)))


def write_spec(path: Path, spec: Spec) -> None:
    """Write what ``main`` reads."""
    write_whole(path, json.dumps(asdict(spec), indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
