"""Grade-school word problems with worked answers, deterministic by seed.

Each problem needs two or more arithmetic steps. Its answer reads like GSM8K's: one worked step a line, then `#### N`.
A problem belongs to training or to the held-out set by a hash of the numbers in its question, so no held-out set of
numbers, in any order, can occur in training. Templates marked `seen=False` are never used in training; they recombine
phrases and operations that other templates have.

    python examples/word_problems.py > heldout.jsonl
"""

import hashlib
import json
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass

from word_problem_templates import TEMPLATES, Template

SHE = [
    "Anna",
    "Bella",
    "Clara",
    "Dora",
    "Emma",
    "Fiona",
    "Grace",
    "Hanna",
    "Iris",
    "Julia",
    "Kate",
    "Lily",
    "Maria",
    "Nina",
    "Olga",
]
HE = [
    "Adam",
    "Ben",
    "Carl",
    "David",
    "Eric",
    "Felix",
    "Greg",
    "Henry",
    "Ivan",
    "Jack",
    "Kevin",
    "Leo",
    "Mark",
    "Noah",
    "Oscar",
]
NAMES = {"she": SHE, "he": HE}
ITEMS = [
    "apples",
    "balls",
    "beads",
    "books",
    "buttons",
    "cards",
    "coins",
    "cookies",
    "cups",
    "eggs",
    "marbles",
    "oranges",
    "pencils",
    "shells",
    "stickers",
    "toys",
]
CONTAINERS = ["bags", "baskets", "boxes", "crates", "jars", "packs"]

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
RESULT_NAMES = "xyzw"
SMALLEST_VALUE, LARGEST_VALUE = 2, 999
HELDOUT_ONE_IN = 20
TRAINING_SEED = 1
HELDOUT_SEED = 2024
NUM_HELDOUT_SEEN, NUM_HELDOUT_UNSEEN = 400, 100


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem: `question`, worked `answer` ending in `#### number`, and where it came from."""

    template: str
    template_seen: bool
    numbers: tuple[int, ...]
    question: str
    answer: str
    number: int

    @property
    def prompt(self) -> str:
        """The text a model is given; the answer follows after one space."""
        return f"Question: {self.question}\nAnswer:"


def is_heldout(numbers: tuple[int, ...]) -> bool:
    """Whether these numbers, in any order, are kept out of training: one in `HELDOUT_ONE_IN`, by hash."""
    key = ",".join(map(str, sorted(numbers))).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % HELDOUT_ONE_IN == 0


def work_out(template: Template, values: dict[str, int]) -> dict[str, int] | None:
    """`values` plus the result of each step, or None if one is fractional or outside 2..999."""
    known = dict(values)
    for result_name, (expression, _) in zip(RESULT_NAMES, template.steps, strict=False):
        left, sign, right = expression.split()
        left_value, right_value = operand(left, known), operand(right, known)
        if sign == "/" and left_value % right_value:
            return None
        result = OPERATIONS[sign](left_value, right_value)
        if not SMALLEST_VALUE <= result <= LARGEST_VALUE:
            return None
        known[result_name] = result
    return known


def operand(text: str, known: dict[str, int]) -> int:
    """The value of a variable, or of a literal such as the 2 of "twice"."""
    return int(text) if text.isdigit() else known[text]


def draw_values(
    rng: random.Random, templates: tuple[Template, ...], *, heldout: bool
) -> tuple[Template, dict[str, int]]:
    """A template and numbers for it, step results included, redrawn until they belong to the side asked for."""
    template = rng.choice(templates)
    while True:
        values = {name: rng.randint(low, high) for name, (low, high) in template.ranges.items()}
        if is_heldout(tuple(values.values())) is heldout:
            known = work_out(template, values)
            if known is not None:
                return template, known


def render(rng: random.Random, template: Template, known: dict[str, int]) -> Problem:
    """The problem as text, with names and things drawn from `rng`."""
    pronoun = rng.choice(("she", "he"))
    name = rng.choice(NAMES[pronoun])
    friend, other = rng.sample([n for n in SHE + HE if n != name], 2)
    items, goods = rng.sample(ITEMS, 2)
    words: dict[str, int | str] = {
        **known, "name": name, "he": pronoun, "He": pronoun.capitalize(), "friend": friend, "other": other,
        "items": items, "goods": goods, "boxes": rng.choice(CONTAINERS),
    }  # fmt: skip
    lines = []
    for result_name, (expression, sentence) in zip(RESULT_NAMES, template.steps, strict=False):
        left, sign, right = expression.split()
        equation = f"{operand(left, known)} {sign} {operand(right, known)} = {known[result_name]}"
        lines.append(sentence.format(eq=equation, **words))
    number = known[RESULT_NAMES[len(template.steps) - 1]]
    return Problem(
        template=template.key,
        template_seen=template.seen,
        numbers=tuple(known[variable] for variable in template.ranges),
        question=template.question.format(**words),
        answer="\n".join([*lines, f"#### {number}"]),
        number=number,
    )


def training_numbers(seed: int, index: int) -> tuple[int, ...]:
    """The numbers of `training_problem(seed, index)`, without the cost of writing it out."""
    template, known = draw_values(random.Random(f"{seed}:{index}"), SEEN_TEMPLATES, heldout=False)
    return tuple(known[variable] for variable in template.ranges)


def training_problem(seed: int, index: int) -> Problem:
    """Problem `index` of the endless training stream `seed`; any index can be had on its own."""
    rng = random.Random(f"{seed}:{index}")
    return render(rng, *draw_values(rng, SEEN_TEMPLATES, heldout=False))


def heldout_problems() -> list[Problem]:
    """The 500 held-out problems, no two with the same numbers: 400 from seen templates, then 100 from unseen ones."""
    rng = random.Random(HELDOUT_SEED)
    taken: set[tuple[int, ...]] = set()
    problems = list(distinct_heldout(rng, SEEN_TEMPLATES, NUM_HELDOUT_SEEN, taken))
    return problems + list(distinct_heldout(rng, UNSEEN_TEMPLATES, NUM_HELDOUT_UNSEEN, taken))


def distinct_heldout(
    rng: random.Random, templates: tuple[Template, ...], count: int, taken: set[tuple[int, ...]]
) -> Iterator[Problem]:
    """`count` held-out problems, the templates in turn, whose numbers are not in `taken`; adds theirs to it."""
    for index in range(count):
        template = templates[index % len(templates)]
        while True:
            problem = render(rng, *draw_values(rng, (template,), heldout=True))
            key = tuple(sorted(problem.numbers))
            if key not in taken:
                break
        taken.add(key)
        yield problem


def heldout_line(problem: Problem) -> str:
    """One line of `heldout.jsonl`."""
    return json.dumps(
        {
            "question": problem.question,
            "answer": problem.answer,
            "number": problem.number,
            "template": problem.template,
            "template_seen": problem.template_seen,
        }
    )


SEEN_TEMPLATES = tuple(template for template in TEMPLATES if template.seen)
UNSEEN_TEMPLATES = tuple(template for template in TEMPLATES if not template.seen)

if __name__ == "__main__":
    print("\n".join(map(heldout_line, heldout_problems())))
