"""lm-eval's own gsm8k against one server, in a process of its own: ``python -m ... SPEC.json``.

The task, its prompts, filters and metric are the harness's; only where the problems are read from may change.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from atom_plugin.compare.state import write_whole

TASK = "gsm8k"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is asked of the server at ``url``: fields as ``recipe.Accuracy``; ``task`` a file, "" for the hub's."""

    url: str
    model: str
    task: str
    num_fewshot: int
    limit: int | None
    concurrency: int
    retries: int
    max_tokens: int
    result: str
    samples: str

    def model_args(self) -> dict[str, Any]:
        """Return lm-eval's arguments of local-completions; the server does all tokenisation."""
        return {
            "model": self.model,
            "base_url": f"{self.url}/v1/completions",
            "num_concurrent": self.concurrency,
            "max_retries": self.retries,
            "max_gen_toks": self.max_tokens,
            "tokenizer_backend": "None",
            "tokenized_requests": False,
            "timeout": 3600,
        }


def write_task(folder: Path, asked: Path, shown: Path) -> Path:
    """Write the harness's gsm8k with its problems read from two files, and return the task's file."""
    import lm_eval
    import yaml

    own = Path(lm_eval.__file__).parent / "tasks" / TASK / f"{TASK}.yaml"
    changes = {
        "include": str(own),
        "task": TASK,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(asked), "train": str(shown)}},
    }
    path = folder / f"{TASK}.yaml"
    write_whole(path, yaml.safe_dump(changes, sort_keys=False))
    return path


def run(spec: Spec) -> dict[str, Any]:
    """Return metrics, the outcome of each problem, and how many answers the token limit cut off."""
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    finished: list[str] = []
    tokens: list[int] = []

    class CountingCompletions(LocalCompletionsAPI):
        """local-completions that notes why each answer ended, which the harness does not keep."""

        def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
            for output in outputs if isinstance(outputs, list) else [outputs]:
                finished.extend(choice["finish_reason"] for choice in output["choices"])
                tokens.append(output["usage"]["completion_tokens"])
            return list(super().parse_generations(outputs, **kwargs))

    begin = time.monotonic()
    found = simple_evaluate(
        model=CountingCompletions(**spec.model_args()),
        tasks=[spec.task or TASK],
        num_fewshot=spec.num_fewshot,
        limit=spec.limit,
    )
    seconds = time.monotonic() - begin
    samples = found["samples"][TASK]
    write_whole(Path(spec.samples), "".join(json.dumps(one, default=str) + "\n" for one in samples))
    filters = sorted({one["filter"] for one in samples})
    outcomes = {
        name: {one["doc_id"]: int(one["exact_match"]) for one in samples if one["filter"] == name} for name in filters
    }
    metrics = found["results"][TASK]
    return {
        "harness": "lm-eval",
        "version": metadata.version("lm-eval"),
        "task_version": found["versions"][TASK],
        "num_fewshot": spec.num_fewshot,
        "metrics": {
            name: {"value": metrics[f"exact_match,{name}"], "stderr": metrics[f"exact_match_stderr,{name}"]}
            for name in filters
        },
        "outcomes": {name: [of[index] for index in sorted(of)] for name, of in outcomes.items()},
        "cut": finished.count("length"),
        "answers": len(finished),
        "output_tokens": sum(tokens),
        "seconds": seconds,
    }


def main(path: str) -> None:
    """Run what a spec asks and write its result."""
    spec = Spec(**json.loads(Path(path).read_text()))
    write_whole(Path(spec.result), json.dumps(run(spec)))


def write_spec(path: Path, spec: Spec) -> None:
    """Write what ``main`` reads."""
    write_whole(path, json.dumps(asdict(spec), indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
