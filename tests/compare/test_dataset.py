"""Problems are checked line by line, and the error says which file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atom_plugin.compare import dataset
from atom_plugin.compare.failure import MeasureError
from atom_plugin.recipe import Accuracy, Recipe

GOOD = {"question": "How many?", "answer": "2 + 2 = 4\n#### 4"}


def written(tmp_path: Path, *lines: object, name: str = "problems.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question": "Ho', "not a line of JSON"),
        ("[1, 2]", "an object with question and answer is accepted, this is list"),
        ({"question": "How many?"}, "answer is None; a text is accepted"),
        ({"question": 3, "answer": "#### 4"}, "question is 3; a text is accepted"),
        ({"question": "How many?", "answer": "four"}, "answer ends in 'four'; '#### NUMBER' is accepted"),
        ("", "not a line of JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, says: str) -> None:
    path = written(tmp_path, GOOD, GOOD, line, GOOD)
    with pytest.raises(MeasureError) as raised:
        dataset.read_problems(path)
    assert f"{path}:3: " in str(raised.value) and says in str(raised.value)


def test_no_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"absent.jsonl: cannot be read"):
        dataset.read_problems(tmp_path / "absent.jsonl")
    with pytest.raises(MeasureError, match="is empty"):
        dataset.read_problems(written(tmp_path))


def recipe(path: Path, num_fewshot: int, shown: Path | None = None) -> Recipe:
    return Recipe(
        title="", model="m", dataset=str(path), fewshot_dataset=None if shown is None else str(shown),
        accuracy=Accuracy(num_fewshot=num_fewshot),
    )  # fmt: skip


def test_what_prompts_show_is_not_asked(tmp_path: Path) -> None:
    problems = [{**GOOD, "question": f"Question {i}?"} for i in range(5)]
    path, other = written(tmp_path, *problems), written(tmp_path, GOOD, GOOD, name="other.jsonl")
    asked, shown = dataset.split(recipe(path, 2))
    assert [one.question for one in shown] == ["Question 0?", "Question 1?"]
    assert [one.question for one in asked] == ["Question 2?", "Question 3?", "Question 4?"]
    asked, shown = dataset.split(recipe(path, 2, other))
    assert len(asked) == 5 and len(shown) == 2
    with pytest.raises(MeasureError, match=r"other.jsonl has 2 problems, too few for --num-fewshot 3"):
        dataset.split(recipe(path, 3, other))
    with pytest.raises(MeasureError, match="its 5 problems are all shown"):
        dataset.split(recipe(path, 5))


def test_negative_and_grouped_numbers_are_final_numbers(tmp_path: Path) -> None:
    lines = [{**GOOD, "answer": f"so\n#### {number}"} for number in ("-3", "1,200", "2.5", "7 ")]
    assert len(dataset.read_problems(written(tmp_path, *lines))) == 4
