"""Contract: generated problems are right and reproducible, and held-out numbers never occur in training."""

import json
import operator
import random
import re
from pathlib import Path

import pytest
import word_problems
from word_problem_templates import TEMPLATES, Template
from word_problems import TRAINING_SEED, Problem, heldout_problems, training_numbers, training_problem

HELDOUT_FILE = Path(word_problems.__file__).parent / "tiny-qwen3-moe" / "heldout.jsonl"
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
EXACT = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def check_worked_steps(problem: Problem) -> None:
    """Each line has one right equation whose operands are known by then; the last result is the answer."""
    *steps, last = problem.answer.split("\n")
    assert len(steps) >= 2
    known = {int(digits) for digits in re.findall(r"\d+", problem.question)} | {2}
    result = None
    for line in steps:
        assert len(re.findall(r"\d+", line)) == 3, line
        left, sign, right, result = EQUATION.search(line).groups()
        assert EXACT[sign](int(left), int(right)) == int(result), line
        assert {int(left), int(right)} <= known, line
        known.add(int(result))
    assert last == f"#### {result}"
    assert problem.number == int(result)


def test_there_are_templates_enough() -> None:
    assert sum(template.seen for template in TEMPLATES) >= 30
    assert sum(not template.seen for template in TEMPLATES) >= 5
    assert len({template.key for template in TEMPLATES}) == len(TEMPLATES)
    assert len({template.question for template in TEMPLATES}) == len(TEMPLATES)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.key)
def test_every_template_is_worked_out_right(template: Template) -> None:
    rng = random.Random(7)
    for _ in range(40):
        problem = word_problems.render(rng, *word_problems.draw_values(rng, (template,), heldout=False))
        check_worked_steps(problem)
        written = [int(digits) for digits in re.findall(r"\d+", problem.question)]
        assert sorted(written) == sorted(problem.numbers)
        assert "{" not in problem.question + problem.answer


def test_heldout_problems_are_worked_out_right() -> None:
    for problem in heldout_problems():
        check_worked_steps(problem)


def test_heldout_set_has_the_promised_shape() -> None:
    problems = heldout_problems()
    assert [problem.template_seen for problem in problems] == [True] * 400 + [False] * 100
    assert len({tuple(sorted(problem.numbers)) for problem in problems}) == 500
    assert len({problem.number for problem in problems}) >= 200
    assert {problem.template for problem in problems} == {template.key for template in TEMPLATES}


def test_committed_heldout_file_is_what_the_generator_writes() -> None:
    lines = HELDOUT_FILE.read_text().splitlines()
    assert lines == [word_problems.heldout_line(problem) for problem in heldout_problems()]
    assert HELDOUT_FILE.stat().st_size < 300_000
    assert set(json.loads(lines[0])) == {"question", "answer", "number", "template", "template_seen"}


def test_training_never_has_heldout_numbers_in_any_order() -> None:
    heldout = {tuple(sorted(problem.numbers)) for problem in heldout_problems()}
    for index in range(200_000):
        assert tuple(sorted(training_numbers(TRAINING_SEED, index))) not in heldout, index


def test_training_never_uses_unseen_templates_and_is_reproducible() -> None:
    for index in range(2_000):
        problem = training_problem(TRAINING_SEED, index)
        assert problem.template_seen
        assert problem.numbers == training_numbers(TRAINING_SEED, index)
        assert problem == training_problem(TRAINING_SEED, index)


def test_another_seed_gives_other_problems() -> None:
    ours = [training_problem(TRAINING_SEED, index) for index in range(100)]
    others = [training_problem(TRAINING_SEED + 1, index) for index in range(100)]
    assert sum(a == b for a, b in zip(ours, others, strict=True)) <= 1


def test_prompt_reads_like_a_few_shot_harness_wants_it() -> None:
    problem = training_problem(TRAINING_SEED, 0)
    assert problem.prompt == f"Question: {problem.question}\nAnswer:"
