"""GSM8K problems: read from JSON lines and checked, or fetched from the hub, and kept beside the results."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom_plugin.compare.failure import MeasureError
from atom_plugin.recipe import Recipe

ASKED, SHOWN = "test.jsonl", "train.jsonl"
HUB_NAME, HUB_CONFIG = "openai/gsm8k", "main"
#: How the answers end that the harnesses score against.
_FINAL_NUMBER = re.compile(r"#### -?[0-9][0-9,]*(\.[0-9]+)?\s*$")


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, which ends in ``#### NUMBER``."""

    question: str
    answer: str


def read_problems(path: Path) -> list[Problem]:
    """Return the problems of a file of JSON lines; MeasureError names the file and the line that is not one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MeasureError(f"{path}: cannot be read: {error}") from error
    problems = [_problem(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    if not problems:
        raise MeasureError(f"{path} is empty; lines of {{'question': ..., 'answer': ...}} are accepted")
    return problems


def _problem(line: str, where: str) -> Problem:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise MeasureError(f"{where}: not a line of JSON: {error}") from error
    if not isinstance(value, dict):
        raise MeasureError(f"{where}: an object with question and answer is accepted, this is {type(value).__name__}")
    for name in ("question", "answer"):
        if not isinstance(value.get(name), str) or not value[name].strip():
            raise MeasureError(f"{where}: {name} is {value.get(name)!r}; a text is accepted")
    if not _FINAL_NUMBER.search(value["answer"]):
        raise MeasureError(f"{where}: answer ends in {value['answer'][-30:]!r}; '#### NUMBER' is accepted")
    return Problem(value["question"], value["answer"])


def write_problems(path: Path, problems: list[Problem]) -> None:
    """Write problems as the harnesses read them."""
    path.write_text("".join(json.dumps({"question": one.question, "answer": one.answer}) + "\n" for one in problems))


def split(recipe: Recipe) -> tuple[list[Problem], list[Problem]]:
    """Return (the problems that are asked, those that few-shot prompts show) of a recipe with a dataset.

    Without a ``fewshot_dataset`` the first problems of the dataset are shown and not asked.
    """
    if recipe.dataset is None:
        raise ValueError("a recipe without a dataset takes the hub's")
    num_fewshot = recipe.accuracy.num_fewshot if recipe.accuracy is not None else 0
    problems, shown_in = read_problems(Path(recipe.dataset)), recipe.fewshot_dataset
    shown = problems[:num_fewshot] if shown_in is None else read_problems(Path(shown_in))
    if len(shown) < num_fewshot:
        where = shown_in or recipe.dataset
        raise MeasureError(f"{where} has {len(shown)} problems, too few for --num-fewshot {num_fewshot}")
    asked = problems[num_fewshot:] if shown_in is None else problems
    if not asked:
        raise MeasureError(
            f"{recipe.dataset}: its {len(problems)} problems are all shown by --num-fewshot {num_fewshot}"
        )
    return asked, shown


def fingerprint(path: str | None) -> str:
    """Return what tells one dataset from another: the hub's name, or a hash of the file."""
    if path is None:
        return f"{HUB_NAME} of the hub"
    try:
        return f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
    except OSError as error:
        raise MeasureError(f"{path}: cannot be read: {error}") from error


def fetch(folder: Path) -> None:
    """Write the hub's GSM8K into ``folder``; raises what the datasets library does. Run in a process of its own."""
    from datasets import load_dataset

    both = load_dataset(HUB_NAME, HUB_CONFIG)
    for name, part in ((SHOWN, "train"), (ASKED, "test")):
        write_problems(folder / name, [Problem(one["question"], one["answer"]) for one in both[part]])


if __name__ == "__main__":
    import sys

    fetch(Path(sys.argv[1]))
