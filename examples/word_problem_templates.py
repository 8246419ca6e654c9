"""The templates that `word_problems.py` fills: question, worked steps, ranges of the numbers.

A step is (expression, sentence); the results are called x, y, z, w in order, and `{eq}` is the worked equation.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """A problem with holes: `ranges` gives each number's bounds, both ends included."""

    key: str
    question: str
    steps: tuple[tuple[str, str], ...]
    ranges: dict[str, tuple[int, int]]
    seen: bool = True


LEFT = "{name} has {eq} {items} left."
NOW = "{name} now has {eq} {items}."
TOGETHER = "Together they have {eq} {items}."
FRIEND = "{friend} has {eq} {items}."
COST = "The {items} cost {eq} dollars."
GOODS_COST = "The {goods} cost {eq} dollars."
ALL_MONEY = "In all that is {eq} dollars."
MONEY_LEFT = "{name} has {eq} dollars left."
FULL = "The {boxes} hold {eq} {items}."
SHARE = "Each friend gets {eq} {items}."
PACKED = "{name} fills {eq} {boxes}."
EARNED = "{name} earns {eq} dollars."

SMALL, TABLE, TENS, WIDE, BIG = (2, 9), (3, 40), (10, 99), (20, 160), (100, 480)


def unseen(key: str, question: str, steps: tuple[tuple[str, str], ...], ranges: dict[str, tuple[int, int]]) -> Template:
    """A template that training never uses."""
    return Template(key, question, steps, ranges, seen=False)


TEMPLATES = (
    # One person's things.
    Template(
        "buy_give",
        "{name} has {a} {items}. {He} buys {b} more {items} and then gives {c} {items} to {friend}. "
        "How many {items} does {name} have left?",
        (("a + b", NOW), ("x - c", LEFT)),
        {"a": WIDE, "b": TENS, "c": TENS},
    ),
    Template(
        "give_give",
        "{name} has {a} {items}. {He} gives {b} {items} to {friend} and {c} {items} to {other}. "
        "How many {items} does {name} have left?",
        (("a - b", LEFT), ("x - c", LEFT)),
        {"a": BIG, "b": TENS, "c": TENS},
    ),
    Template(
        "lose_find",
        "{name} has {a} {items}. {He} loses {b} {items} and then finds {c} {items}. "
        "How many {items} does {name} have now?",
        (("a - b", LEFT), ("x + c", NOW)),
        {"a": BIG, "b": TENS, "c": TENS},
    ),
    Template(
        "find_buy",
        "{name} has {a} {items}. {He} finds {b} {items} and then buys {c} more {items}. "
        "How many {items} does {name} have now?",
        (("a + b", NOW), ("x + c", NOW)),
        {"a": WIDE, "b": TENS, "c": TENS},
    ),
    Template(
        "buy_share",
        "{name} has {a} {items}. {He} buys {b} more {items} and then shares all of them equally among {k} friends. "
        "How many {items} does each friend get?",
        (("a + b", NOW), ("x / k", SHARE)),
        {"a": TENS, "b": TENS, "k": SMALL},
    ),
    Template(
        "lose_pack",
        "{name} has {a} {items}. {He} loses {b} {items} and packs the rest into {boxes} of {k}. "
        "How many {boxes} does {name} fill?",
        (("a - b", LEFT), ("x / k", PACKED)),
        {"a": WIDE, "b": TENS, "k": SMALL},
    ),
    Template(
        "give_half",
        "{name} has {a} {items}. {He} buys {b} more {items} and then gives half of them to {friend}. "
        "How many {items} does {friend} get?",
        (("a + b", NOW), ("x / 2", "{friend} gets {eq} {items}.")),
        {"a": WIDE, "b": TENS},
    ),
    # Boxes of things.
    Template(
        "boxes_give",
        "{name} has {k} {boxes} with {n} {items} each. {He} gives {c} {items} to {friend}. "
        "How many {items} does {name} have left?",
        (("k * n", FULL), ("x - c", LEFT)),
        {"k": SMALL, "n": TABLE, "c": TENS},
    ),
    Template(
        "boxes_buy",
        "{name} has {k} {boxes} with {n} {items} each. {He} buys {c} more {items}. "
        "How many {items} does {name} have now?",
        (("k * n", FULL), ("x + c", NOW)),
        {"k": SMALL, "n": TABLE, "c": TENS},
    ),
    Template(
        "boxes_give_share",
        "{name} has {k} {boxes} with {n} {items} each. {He} gives {c} {items} to {friend} "
        "and shares the rest equally among {m} friends. How many {items} does each friend get?",
        (("k * n", FULL), ("x - c", LEFT), ("y / m", SHARE)),
        {"k": SMALL, "n": TABLE, "c": TENS, "m": SMALL},
    ),
    Template(
        "boxes_lose_find",
        "{name} has {k} {boxes} with {n} {items} each. {He} loses {b} {items} and then finds {c} {items}. "
        "How many {items} does {name} have now?",
        (("k * n", FULL), ("x - b", LEFT), ("y + c", NOW)),
        {"k": SMALL, "n": TABLE, "b": TENS, "c": TENS},
    ),
    Template(
        "two_kinds",
        "{name} has {k} {boxes} with {n} {items} each and {m} {boxes} with {p} {goods} each. "
        "How many things does {name} have in all?",
        (("k * n", FULL), ("m * p", "The other {boxes} hold {eq} {goods}."), ("x + y", "In all that is {eq} things.")),
        {"k": SMALL, "n": TABLE, "m": SMALL, "p": TABLE},
    ),
    Template(
        "mixed_boxes",
        "{name} puts {a} {items} and {b} {goods} into each box. {He} fills {k} boxes. "
        "How many things does {name} have in all?",
        (("a + b", "Each box holds {eq} things."), ("x * k", "In all that is {eq} things.")),
        {"a": (2, 20), "b": (2, 20), "k": SMALL},
    ),
    # Two or three people.
    Template(
        "more_together",
        "{name} has {a} {items}. {friend} has {b} more {items} than {name}. How many {items} do they have together?",
        (("a + b", FRIEND), ("a + x", TOGETHER)),
        {"a": WIDE, "b": TENS},
    ),
    Template(
        "fewer_together",
        "{name} has {a} {items}. {friend} has {b} fewer {items} than {name}. How many {items} do they have together?",
        (("a - b", FRIEND), ("a + x", TOGETHER)),
        {"a": WIDE, "b": TENS},
    ),
    Template(
        "times_together",
        "{name} has {n} {items}. {friend} has {k} times as many {items} as {name}. "
        "How many {items} do they have together?",
        (("n * k", FRIEND), ("n + x", TOGETHER)),
        {"n": TABLE, "k": SMALL},
    ),
    Template(
        "more_more",
        "{name} has {a} {items}. {friend} has {b} more {items} than {name}. "
        "{other} has {c} more {items} than {friend}. How many {items} does {other} have?",
        (("a + b", FRIEND), ("x + c", "{other} has {eq} {items}.")),
        {"a": WIDE, "b": TENS, "c": TENS},
    ),
    Template(
        "times_fewer",
        "{name} has {n} {items}. {friend} has {k} times as many {items} as {name}. "
        "{other} has {c} fewer {items} than {friend}. How many {items} does {other} have?",
        (("n * k", FRIEND), ("x - c", "{other} has {eq} {items}.")),
        {"n": TABLE, "k": SMALL, "c": TENS},
    ),
    Template(
        "more_give",
        "{name} has {a} {items}. {friend} has {b} more {items} than {name}. {friend} gives {c} {items} to {other}. "
        "How many {items} does {friend} have left?",
        (("a + b", FRIEND), ("x - c", "{friend} has {eq} {items} left.")),
        {"a": WIDE, "b": TENS, "c": TENS},
    ),
    # Shopping and money.
    Template(
        "buy_two_prices",
        "{name} buys {k} {items} for {n} dollars each and {m} {goods} for {p} dollars each. "
        "How many dollars does {name} pay?",
        (("k * n", COST), ("m * p", GOODS_COST), ("x + y", ALL_MONEY)),
        {"k": SMALL, "n": TABLE, "m": SMALL, "p": TABLE},
    ),
    Template(
        "buy_one_more",
        "{name} buys {k} {items} for {n} dollars each and a bike for {c} dollars. How many dollars does {name} pay?",
        (("k * n", COST), ("x + c", ALL_MONEY)),
        {"k": SMALL, "n": TABLE, "c": BIG},
    ),
    Template(
        "buy_from_purse",
        "{name} has {a} dollars. {He} buys {k} {items} for {n} dollars each. How many dollars does {name} have left?",
        (("k * n", COST), ("a - x", MONEY_LEFT)),
        {"a": BIG, "k": SMALL, "n": TABLE},
    ),
    Template(
        "buy_and_bike",
        "{name} has {a} dollars. {He} buys {k} {items} for {n} dollars each and a bike for {c} dollars. "
        "How many dollars does {name} have left?",
        (("k * n", COST), ("x + c", ALL_MONEY), ("a - y", MONEY_LEFT)),
        {"a": BIG, "k": SMALL, "n": TABLE, "c": TENS},
    ),
    Template(
        "discount",
        "A toy costs {a} dollars. Today it is {b} dollars cheaper. {name} buys {k} of them. "
        "How many dollars does {name} pay?",
        (("a - b", "The toy now costs {eq} dollars."), ("x * k", ALL_MONEY)),
        {"a": (10, 45), "b": (2, 20), "k": SMALL},
    ),
    Template(
        "work_spend",
        "{name} earns {n} dollars an hour. {He} works {k} hours and then spends {c} dollars. "
        "How many dollars does {name} have left?",
        (("n * k", EARNED), ("x - c", MONEY_LEFT)),
        {"n": TABLE, "k": SMALL, "c": TENS},
    ),
    Template(
        "work_two_days",
        "{name} earns {n} dollars an hour. {He} works {k} hours on Monday and {m} hours on Tuesday. "
        "How many dollars does {name} earn?",
        (("k + m", "{name} works {eq} hours."), ("n * x", EARNED)),
        {"n": TABLE, "k": (2, 5), "m": (2, 4)},
    ),
    Template(
        "save_weeks",
        "{name} has {a} dollars. {He} saves {n} dollars a week for {k} weeks. How many dollars does {name} have now?",
        (("n * k", "{name} saves {eq} dollars."), ("a + x", "{name} now has {eq} dollars.")),
        {"a": WIDE, "n": TABLE, "k": SMALL},
    ),
    Template(
        "save_for",
        "{name} wants a bike for {a} dollars. {He} has {b} dollars and saves {k} dollars a week. "
        "How many weeks does {name} need?",
        (("a - b", "{name} needs {eq} dollars."), ("x / k", "{name} needs {eq} weeks.")),
        {"a": WIDE, "b": TENS, "k": SMALL},
    ),
    Template(
        "sell_two",
        "{name} sells {a} {items} and {b} {goods} for {k} dollars each. How many dollars does {name} earn?",
        (("a + b", "{name} sells {eq} things."), ("x * k", EARNED)),
        {"a": (2, 20), "b": (2, 20), "k": SMALL},
    ),
    Template(
        "sell_buy",
        "{name} sells {k} {items} for {n} dollars each and then spends {c} dollars. "
        "How many dollars does {name} have left?",
        (("k * n", EARNED), ("x - c", MONEY_LEFT)),
        {"k": SMALL, "n": TABLE, "c": TENS},
    ),
    # Work, reading, travel.
    Template(
        "trays_eat",
        "{name} bakes {k} trays with {n} cookies each. {He} eats {c} cookies and packs the rest into {boxes} of {m}. "
        "How many {boxes} does {name} fill?",
        (("k * n", "The trays hold {eq} cookies."), ("x - c", "{name} has {eq} cookies left."), ("y / m", PACKED)),
        {"k": SMALL, "n": TABLE, "c": (2, 60), "m": SMALL},
    ),
    Template(
        "read_left",
        "A book has {a} pages. {name} reads {n} pages a day for {k} days. How many pages are left?",
        (("n * k", "{name} reads {eq} pages."), ("a - x", "There are {eq} pages left.")),
        {"a": BIG, "n": TABLE, "k": SMALL},
    ),
    Template(
        "read_rest",
        "A book has {a} pages. {name} reads {b} pages on Monday and reads the rest in {k} days. "
        "How many pages a day is that?",
        (("a - b", "There are {eq} pages left."), ("x / k", "{name} reads {eq} pages a day.")),
        {"a": WIDE, "b": TENS, "k": SMALL},
    ),
    Template(
        "train",
        "A train has {a} people on it. At the first stop {b} people get off and {c} people get on. "
        "How many people are on the train now?",
        (("a - b", "There are {eq} people left."), ("x + c", "There are {eq} people now.")),
        {"a": BIG, "b": TENS, "c": TENS},
    ),
    Template(
        "hall",
        "A hall has {k} rows with {n} seats each. {c} seats are empty. How many people are in the hall?",
        (("k * n", "The hall has {eq} seats."), ("x - c", "There are {eq} people.")),
        {"k": SMALL, "n": TABLE, "c": TENS},
    ),
    Template(
        "class_absent",
        "A class has {a} boys and {b} girls. Today {c} children are absent. How many children are in class?",
        (("a + b", "The class has {eq} children."), ("x - c", "There are {eq} children.")),
        {"a": TENS, "b": TENS, "c": TENS},
    ),
    Template(
        "class_teams",
        "A class has {a} boys and {b} girls. They make teams of {k} children. How many teams are there?",
        (("a + b", "The class has {eq} children."), ("x / k", "There are {eq} teams.")),
        {"a": TENS, "b": TENS, "k": SMALL},
    ),
    # Never used in training.
    unseen(
        "give_buy",
        "{name} has {a} {items}. {He} gives {b} {items} to {friend} and then buys {c} more {items}. "
        "How many {items} does {name} have now?",
        (("a - b", LEFT), ("x + c", NOW)),
        {"a": BIG, "b": TENS, "c": TENS},
    ),
    unseen(
        "boxes_find_give",
        "{name} has {k} {boxes} with {n} {items} each. {He} finds {b} {items} and then gives {c} {items} to {friend}. "
        "How many {items} does {name} have left?",
        (("k * n", FULL), ("x + b", NOW), ("y - c", LEFT)),
        {"k": SMALL, "n": TABLE, "b": TENS, "c": TENS},
    ),
    unseen(
        "boxes_share",
        "{name} has {k} {boxes} with {n} {items} each. {He} shares all of them equally among {m} friends. "
        "How many {items} does each friend get?",
        (("k * n", FULL), ("x / m", SHARE)),
        {"k": SMALL, "n": TABLE, "m": SMALL},
    ),
    unseen(
        "times_more",
        "{name} has {n} {items}. {friend} has {k} times as many {items} as {name}. "
        "{other} has {c} more {items} than {friend}. How many {items} does {other} have?",
        (("n * k", FRIEND), ("x + c", "{other} has {eq} {items}.")),
        {"n": TABLE, "k": SMALL, "c": TENS},
    ),
    unseen(
        "purse_two_prices",
        "{name} has {a} dollars. {He} buys {k} {items} for {n} dollars each and {m} {goods} for {p} dollars each. "
        "How many dollars does {name} have left?",
        (("k * n", COST), ("m * p", GOODS_COST), ("x + y", ALL_MONEY), ("a - z", MONEY_LEFT)),
        {"a": BIG, "k": SMALL, "n": TABLE, "m": SMALL, "p": TABLE},
    ),
    unseen(
        "work_two_days_spend",
        "{name} earns {n} dollars an hour. {He} works {k} hours on Monday and {m} hours on Tuesday "
        "and then spends {c} dollars. How many dollars does {name} have left?",
        (("k + m", "{name} works {eq} hours."), ("n * x", EARNED), ("y - c", MONEY_LEFT)),
        {"n": TABLE, "k": (2, 5), "m": (2, 4), "c": TENS},
    ),
    unseen(
        "trays_share",
        "{name} bakes {k} trays with {n} cookies each. {He} eats {c} cookies and shares the rest equally among {m} "
        "friends. How many cookies does each friend get?",
        (
            ("k * n", "The trays hold {eq} cookies."),
            ("x - c", "{name} has {eq} cookies left."),
            ("y / m", "Each friend gets {eq} cookies."),
        ),
        {"k": SMALL, "n": TABLE, "c": (2, 60), "m": SMALL},
    ),
    unseen(
        "train_off_off",
        "A train has {a} people on it. At the first stop {b} people get off and at the second stop {c} people get off. "
        "How many people are on the train now?",
        (("a - b", "There are {eq} people left."), ("x - c", "There are {eq} people now.")),
        {"a": BIG, "b": TENS, "c": TENS},
    ),
)
