"""Tasks for a gate without files: made here from seeds, plain facts and this Python's own source.

The project ships no third-party text. Items are small on purpose: a gate of two minutes buys more
certainty from many short items than from few long ones, and a weak model must be able to answer most
of them, or they carry no signal.
"""

from __future__ import annotations

import ast
import calendar
import itertools
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus

from trivet.evaluate.corpora import builtin_corpora
from trivet.evaluate.results import Kind
from trivet.evaluate.subject import Prompt
from trivet.evaluate.task import Form, Item, Task

_SOURCE = "made by trivet.evaluate.builtin_tasks"

_GROUPS = {
    "animal": "dog horse rabbit tiger sheep eagle salmon monkey lion camel goat mouse bear wolf",
    "fruit": "apple banana cherry grape lemon mango orange peach pear plum melon apricot fig",
    "colour": "red blue green yellow purple white black brown pink grey crimson violet",
    "tool": "hammer saw drill wrench pliers screwdriver chisel axe shovel rake",
    "furniture": "chair table sofa desk bed shelf wardrobe stool bench cupboard",
    "vehicle": "car bus train bicycle truck ship airplane motorcycle tram boat",
    "clothing": "shirt jacket trousers hat glove sock skirt coat scarf sweater",
    "metal": "iron copper gold silver zinc tin lead nickel aluminium steel",
    "instrument": "violin piano guitar flute trumpet drum cello harp clarinet organ",
    "profession": "doctor teacher lawyer farmer baker nurse pilot judge carpenter plumber",
    "country": "France Japan Brazil Egypt Canada India Spain Kenya Norway Mexico",
    "drink": "water milk coffee tea juice wine beer lemonade cocoa cider",
}
_CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "Russia": "Moscow", "China": "Beijing", "Egypt": "Cairo", "Greece": "Athens", "Cuba": "Havana",
    "Portugal": "Lisbon", "Austria": "Vienna", "Poland": "Warsaw", "Norway": "Oslo",
    "Sweden": "Stockholm", "Ireland": "Dublin", "Peru": "Lima", "Kenya": "Nairobi",
    "Hungary": "Budapest", "Denmark": "Copenhagen", "Canada": "Ottawa", "Turkey": "Ankara",
    "Iran": "Tehran", "Iraq": "Baghdad", "Chile": "Santiago", "Argentina": "Buenos Aires",
    "South Korea": "Seoul", "Thailand": "Bangkok", "Finland": "Helsinki", "Belgium": "Brussels",
}  # fmt: skip
_OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "early": "late", "rich": "poor", "wet": "dry",
    "fast": "slow", "young": "old", "light": "dark", "full": "empty", "open": "closed",
    "happy": "sad", "strong": "weak", "high": "low", "near": "far", "left": "right",
    "true": "false", "begin": "end", "win": "lose", "buy": "sell", "day": "night",
    "north": "south", "east": "west", "first": "last", "hard": "soft", "loud": "quiet",
}  # fmt: skip
_SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "lion": "roars",
    "sheep": "bleats", "horse": "neighs", "pig": "grunts", "bee": "buzzes", "snake": "hisses",
}  # fmt: skip
_REPLIES = (
    ("What is the capital of {0}?", "The capital of {0} is {1}.", _CAPITALS),
    ("What is the opposite of {0}?", "The opposite of {0} is {1}.", _OPPOSITES),
    ("What sound does a {0} make?", "A {0} {1}.", _SOUNDS),
)
_NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack", "Kate",
    "Leo", "Maria", "Noah", "Olga", "Paul",
)  # fmt: skip
_CITIES = (
    "London", "Paris", "Rome", "Berlin", "Madrid", "Vienna", "Oslo", "Dublin", "Lisbon", "Prague",
)  # fmt: skip
_FIELDS: dict[str, Sequence[str | int]] = {
    "name": _NAMES,
    "city": _CITIES,
    "age": range(18, 80),
    "year": range(1950, 2020),
    "day": list(calendar.day_name),
    "month": list(calendar.month_name)[1:],
    "capital": list(_CAPITALS.values()),
    **{key: text.split() for key, text in _GROUPS.items()},
}
_SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name} works as a {profession} in {city}.",
    "{name} bought a {colour} {clothing} on {day}.",
    "In {month} {name} moved from {city} to {capital}.",
    "The {colour} {furniture} belongs to {name}.",
    "The {vehicle} to {city} leaves every {day}.",
    "{name} came to {country} in {year}.",
    "On {day} they eat {fruit} and drink {drink}.",
    "{name} plays the {instrument} in {capital} every {month}.",
    "The {vehicle} was built in {country} in {year}.",
    "{name} needs a {tool} and some {metal} by {day}.",
    "The {animal} in the garden of {name} is {age} months old.",
)


def builtin_tasks(seed: int, num_items: int) -> list[Task]:
    """One task or more for every kind but long context; at most ``num_items`` items of each."""
    makers: tuple[Callable[[random.Random, int], Task], ...] = (
        _categories, _facts, _replies, _summaries, _sums, _next_lines, _functions, _queries,
        _records,
    )  # fmt: skip
    return [maker(random.Random(f"{seed} {maker.__name__}"), num_items) for maker in makers]


def _task(
    name: str,
    kind: Kind,
    form: Form,
    items: Sequence[Item],
    stops: tuple[str, ...] = ("\n",),
    max_tokens: int = 32,
) -> Task:
    return Task(name, kind, form, tuple(items), _SOURCE, stops, max_tokens)


def _shuffled(rng: random.Random, right: str, wrong: Sequence[str]) -> tuple[tuple[str, ...], int]:
    choices = [right, *wrong]
    rng.shuffle(choices)
    return tuple(choices), choices.index(right)


def _shared_out(num_items: int, most: int) -> Iterator[int]:
    """How many items each set of examples is for, ``most`` or fewer.

    Items after the same examples err together (they are one ``Item.group``), so that few share them: as
    few as the length of the examples lets a gate pay for.
    """
    for start in range(0, num_items, most):
        yield min(most, num_items - start)


def _categories(rng: random.Random, num_items: int) -> Task:
    """Which of four groups a word belongs to, after a few examples of other words."""
    words = [(word, group) for group, text in _GROUPS.items() for word in text.split()]
    rng.shuffle(words)
    items = []
    asked = iter(words[:num_items])
    for count in _shared_out(min(num_items, len(words) - 6), 1):
        block = list(itertools.islice(asked, count))
        examples = rng.sample([pair for pair in words if pair not in block], 6)
        shots = "".join(f"{word}: {group}\n" for word, group in examples)
        for word, group in block:
            others = rng.sample([name for name in _GROUPS if name != group], 3)
            choices, gold = _shuffled(rng, f" {group}", [f" {name}" for name in others])
            items.append(Item((Prompt(f"{shots}{word}:"),), choices, gold))
    return _task("categories", Kind.CLASSIFICATION, Form.CHOICE, items)


def _facts(rng: random.Random, num_items: int) -> Task:
    """Capitals, opposites, months, days, sounds, meanings of HTTP status codes."""
    facts: list[tuple[str, str, list[str]]] = []

    def add(text: str, pairs: dict[str, str]) -> None:
        for key, value in pairs.items():
            others = sorted({other for other in pairs.values() if other != value})
            facts.append((text.format(key), value, others))

    months, days = list(calendar.month_name)[1:], list(calendar.day_name)
    add("The capital of {} is", _CAPITALS)
    add("The opposite of {} is", _OPPOSITES)
    add("The sound: a {}", _SOUNDS)
    add("The month after {} is", dict(zip(months, [*months[1:], months[0]], strict=True)))
    add("The day after {} is", dict(zip(days, [*days[1:], days[0]], strict=True)))
    codes = (200, 201, 301, 304, 400, 401, 403, 404, 405, 408, 500, 502, 503)
    add("HTTP status {} means", {str(code): HTTPStatus(code).phrase for code in codes})
    rng.shuffle(facts)
    items = []
    for text, value, others in facts[:num_items]:
        choices, gold = _shuffled(rng, f" {value}", [f" {o}" for o in rng.sample(others, 3)])
        items.append(Item((Prompt(text),), choices, gold))
    return _task("facts", Kind.KNOWLEDGE, Form.CHOICE, items)


def _replies(rng: random.Random, num_items: int) -> Task:
    """Which of four replies answers a question asked in a chat."""
    talks = [
        (question.format(key), reply.format(key, value), reply, pairs, key)
        for question, reply, pairs in _REPLIES
        for key, value in pairs.items()
    ]
    rng.shuffle(talks)
    items = []
    for question, right, reply, pairs, key in talks[:num_items]:
        others = [value for name, value in pairs.items() if name != key]
        wrong = [reply.format(key, value) for value in rng.sample(others, 3)]
        choices, gold = _shuffled(rng, right, wrong)
        items.append(Item((Prompt(question, is_chat=True),), choices, gold))
    return _task("replies", Kind.CHAT, Form.CHOICE, items)


def _summaries(rng: random.Random, num_items: int) -> Task:
    """Which of four one-line summaries belongs to a function of the standard library."""
    found = []
    for node in ast.walk(ast.parse(_library_source())):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        summary = (ast.get_docstring(node) or "").strip().split("\n")[0]
        body = "\n".join(ast.unparse(statement) for statement in node.body[1:])
        if 25 <= len(summary) <= 80 and 40 <= len(body) <= 180:
            source = f"def {node.name}({ast.unparse(node.args)}):\n{textwrap.indent(body, '    ')}"
            found.append((source, summary))
    found = sorted(set(found))
    rng.shuffle(found)
    items = []
    for source, summary in found[:num_items]:
        others = [other for _, other in found if other != summary]
        choices, gold = _shuffled(rng, f" {summary}", [f" {o}" for o in rng.sample(others, 3)])
        items.append(Item((Prompt(f"{source}\n\nSummary:"),), choices, gold))
    return _task("summaries", Kind.SUMMARY, Form.CHOICE, items)


def _library_source() -> str:
    """The built-in code corpus, module by module, without what cannot stand in the middle."""
    code = builtin_corpora()[1].text
    return re.sub(r"^from __future__ import.*$", "", code, flags=re.MULTILINE)


def _next_lines(rng: random.Random, num_items: int) -> Task:
    """Which of four lines comes next in the source of the standard library."""
    lines = _library_source().split("\n")
    places = [
        at
        for at in range(12, len(lines))
        if 16 <= len(lines[at]) <= 60
        and not lines[at].strip().startswith(("#", '"', "'"))
        and all(len(line) <= 90 for line in lines[at - 4 : at])
    ]
    items = []
    for at in rng.sample(places, num_items):
        context = "\n".join(lines[at - 4 : at]) + "\n"
        indent = len(lines[at]) - len(lines[at].lstrip())
        alike = [p for p in places if len(lines[p]) - len(lines[p].lstrip()) == indent]
        others = [lines[p] for p in alike if lines[p] != lines[at] and abs(p - at) > 40]
        if len(others) < 3:
            continue
        choices, gold = _shuffled(rng, lines[at], rng.sample(others, 3))
        items.append(Item((Prompt(context),), choices, gold))
    return _task("next-lines", Kind.CODE, Form.CHOICE, items)


def _sums(rng: random.Random, num_items: int) -> Task:
    """Additions and subtractions of small numbers."""

    def one() -> tuple[str, str]:
        if rng.random() < 0.7:
            a, b = rng.randrange(2, 60), rng.randrange(2, 40)
            return f"{a} + {b} =", f" {a + b}"
        a = rng.randrange(10, 60)
        b = rng.randrange(1, 10)
        return f"{a} - {b} =", f" {a - b}"

    asked = sorted({one() for _ in range(4 * num_items)}, key=lambda pair: rng.random())
    waiting = iter(asked[:num_items])
    items = []
    for count in _shared_out(len(asked[:num_items]), 1):
        shots = "".join("".join(one()) + "\n" for _ in range(4))
        for question, answer in itertools.islice(waiting, count):
            items.append(Item((Prompt(shots + question),), answer=f"{answer}\n"))
    return _task("sums", Kind.MATHS, Form.EXACT, items)


_FUNCTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("add", "a, b", "Return the sum of a and b.", "a + b"),
    ("subtract", "a, b", "Return a minus b.", "a - b"),
    ("multiply", "a, b", "Return the product of a and b.", "a * b"),
    ("square", "x", "Return x squared.", "x * x"),
    ("cube", "x", "Return x cubed.", "x * x * x"),
    ("double", "x", "Return twice x.", "2 * x"),
    ("negate", "x", "Return minus x.", "-x"),
    ("is_even", "n", "Return True if n is even.", "n % 2 == 0"),
    ("is_odd", "n", "Return True if n is odd.", "n % 2 == 1"),
    ("is_positive", "x", "Return True if x is greater than zero.", "x > 0"),
    ("is_negative", "x", "Return True if x is less than zero.", "x < 0"),
    ("is_zero", "x", "Return True if x is zero.", "x == 0"),
    ("absolute", "x", "Return the absolute value of x.", "abs(x)"),
    ("largest", "a, b", "Return the larger of a and b.", "max(a, b)"),
    ("smallest", "a, b", "Return the smaller of a and b.", "min(a, b)"),
    ("are_equal", "a, b", "Return True if a equals b.", "a == b"),
    ("remainder", "a, b", "Return the remainder of a divided by b.", "a % b"),
    ("half", "x", "Return half of x.", "x / 2"),
    ("increment", "x", "Return x plus one.", "x + 1"),
    ("decrement", "x", "Return x minus one.", "x - 1"),
    ("average", "a, b", "Return the average of a and b.", "(a + b) / 2"),
    ("power", "a, b", "Return a to the power of b.", "a ** b"),
    ("to_text", "x", "Return x as a string.", "str(x)"),
    ("is_divisible", "a, b", "Return True if a is divisible by b.", "a % b == 0"),
    ("length", "items", "Return the number of items in a list.", "len(items)"),
    ("total", "items", "Return the sum of a list of numbers.", "sum(items)"),
    ("first", "items", "Return the first item of a list.", "items[0]"),
    ("last", "items", "Return the last item of a list.", "items[-1]"),
    ("largest_item", "items", "Return the largest item of a list.", "max(items)"),
    ("smallest_item", "items", "Return the smallest item of a list.", "min(items)"),
    ("sort_items", "items", "Return a sorted copy of a list.", "sorted(items)"),
    ("reverse_items", "items", "Return a list in reverse order.", "items[::-1]"),
    ("is_empty", "items", "Return True if a list is empty.", "len(items) == 0"),
    ("unique_count", "items", "Return the number of different items.", "len(set(items))"),
    ("upper", "text", "Return the text in upper case.", "text.upper()"),
    ("lower", "text", "Return the text in lower case.", "text.lower()"),
    ("strip_text", "text", "Return the text without spaces around it.", "text.strip()"),
    ("reverse_text", "text", "Return the text backwards.", "text[::-1]"),
    ("words", "text", "Return the words of a text as a list.", "text.split()"),
    ("join_text", "a, b", "Return the texts a and b joined.", "a + b"),
)
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "items": ("[3, 1, 2]", "[5, 5, 9, 4]", "[7]"),
    "text": ("' Ab c '", "'hello World'", "'x'"),
    "n": ("4", "7", "0"),
    "x": ("3", "-4", "0"),
    "a, b": ("(7, 2)", "(2, 5)", "(3, 3)"),
}


def _numbered_functions() -> Iterator[tuple[str, str, str, str]]:
    """Name, arguments, docstring and body of functions with a number in them."""
    for n in range(2, 10):
        yield f"add_{n}", "x", f"Return x plus {n}.", f"x + {n}"
        yield f"subtract_{n}", "x", f"Return x minus {n}.", f"x - {n}"
        yield f"multiply_by_{n}", "x", f"Return x times {n}.", f"x * {n}"
        yield f"divide_by_{n}", "x", f"Return x divided by {n}.", f"x / {n}"
        yield f"is_above_{n}", "x", f"Return True if x is greater than {n}.", f"x > {n}"
        yield f"is_below_{n}", "x", f"Return True if x is less than {n}.", f"x < {n}"
        yield f"is_multiple_of_{n}", "n", f"Return True if n is divisible by {n}.", f"n % {n} == 0"
        yield f"repeat_{n}", "text", f"Return the text {n} times.", f"text * {n}"


def _functions(rng: random.Random, num_items: int) -> Task:
    """One-line Python functions from their first line and docstring; run against calls."""
    functions = [*_FUNCTIONS, *_numbered_functions()]
    rng.shuffle(functions)
    waiting = iter(functions[:num_items])
    items = []
    for group, count in enumerate(_shared_out(len(functions[:num_items]), 4)):
        block = list(itertools.islice(waiting, count))
        examples = rng.sample([f for f in functions if f not in block], 2)
        shots = "".join(_head(*f[:3]) + f"\n    return {f[3]}\n\n\n" for f in examples)
        for name, arguments, text, body in block:
            head = _head(name, arguments, text)
            reference = f"(lambda {arguments}: {body})"
            calls = [call[1:-1] if arguments == "a, b" else call for call in _ARGUMENTS[arguments]]
            tests = "".join(f"assert {name}({call}) == {reference}({call})\n" for call in calls)
            items.append(
                Item(
                    (Prompt(shots + head),),
                    answer=f"\n    return {body}\n",
                    data={"tests": tests, "head": head},
                    group=group,
                )
            )
    stops = ("\ndef ", "\n\n\n", "\nclass ")
    return _task("functions", Kind.CODE, Form.CODE, items, stops)


def _head(name: str, arguments: str, text: str) -> str:
    return f'def {name}({arguments}):\n    """{text}"""'


def _queries(rng: random.Random, num_items: int) -> Task:
    """Questions on small tables as SQL, after examples; run on SQLite."""
    items: list[Item] = []
    for group, count in enumerate(_shared_out(num_items, 4)):
        schema, create, made = _table(rng)
        shots = "".join(f"-- {question}\n{sql};\n" for question, sql in made[:6])
        items += [
            Item(
                (Prompt(f"{create}\n{shots}-- {question}\n"),),
                answer=f"{sql};",
                data={"schema": schema},
                group=group,
            )
            for question, sql in made[6 : 6 + count]
        ]
    return _task("queries", Kind.SQL, Form.SQL, items, (";", "\n"))


def _table(rng: random.Random) -> tuple[str, str, list[tuple[str, str]]]:
    """A small table as SQL, filled and empty, and questions with their queries."""
    names = rng.sample(_NAMES, 10)
    rows = [(name, rng.randrange(18, 70), rng.choice(_CITIES[:5])) for name in names]
    values = ", ".join(f"('{name}', {age}, '{city}')" for name, age, city in rows)
    create = "CREATE TABLE people (name TEXT, age INTEGER, city TEXT);"
    schema = f"{create} INSERT INTO people VALUES {values};"
    ages, cities = sorted(age for _, age, _ in rows), sorted({city for *_, city in rows})
    made: list[tuple[str, str]] = [
        ("How many people are there?", "SELECT COUNT(*) FROM people"),
        ("What is the highest age?", "SELECT MAX(age) FROM people"),
        ("What is the lowest age?", "SELECT MIN(age) FROM people"),
        ("What is the average age?", "SELECT AVG(age) FROM people"),
    ]
    for age in sorted(set(ages[1:-1])):
        made.append((f"Who is older than {age}?", f"SELECT name FROM people WHERE age > {age}"))
        made.append((f"Who is younger than {age}?", f"SELECT name FROM people WHERE age < {age}"))
    for city in cities:
        made.append((f"Who lives in {city}?", f"SELECT name FROM people WHERE city = '{city}'"))
        made.append(
            (
                f"How many people live in {city}?",
                f"SELECT COUNT(*) FROM people WHERE city = '{city}'",
            )
        )
    for name in names:
        made.append((f"How old is {name}?", f"SELECT age FROM people WHERE name = '{name}'"))
        made.append((f"Where does {name} live?", f"SELECT city FROM people WHERE name = '{name}'"))
    rng.shuffle(made)
    return schema, create, made


def _records(rng: random.Random, num_items: int) -> Task:
    """A sentence as a JSON object with two of the things it names.

    Each set of examples has a sentence and keys of its own. How sure a model is of one pattern moves
    by several points with any change of its weights, up or down: only over many does it show a loss.
    """
    patterns = [
        (sentence, keys)
        for sentence in _SENTENCES
        for keys in itertools.permutations(re.findall(r"{(\w+)}", sentence), 2)
    ]
    rng.shuffle(patterns)
    items: list[Item] = []
    for group, count in enumerate(_shared_out(num_items, 2)):
        sentence, keys = patterns[group % len(patterns)]
        made: dict[str, dict[str, str | int]] = {}
        while len(made) < 2 + count:
            values = {key: rng.choice(words) for key, words in _FIELDS.items()}
            made[sentence.format(**values)] = {key: values[key] for key in keys}
        pairs = list(made.items())
        shots = "".join(f"{text}\n{json.dumps(record)}\n" for text, record in pairs[:2])
        items += [
            Item(
                (Prompt(f"{shots}{text}\n"),),
                answer=f"{json.dumps(record)}\n",
                data={"format": {"json": record}},
                group=group,
            )
            for text, record in pairs[2:]
        ]
    return _task("records", Kind.STRUCTURED_OUTPUT, Form.FORMAT, items, max_tokens=48)


def held_out_prompts(seed: int, num_prompts: int) -> list[Prompt]:
    """Prompts for texts side by side: chats, and beginnings of prose and code, half and half."""
    rng = random.Random(f"{seed} prompts")
    prose, code = (corpus.text for corpus in builtin_corpora())
    prompts: list[Prompt] = []
    topics = ("bread", "the moon", "bicycles", "rivers", "chess", "music", "winter", "trees",
              "sleep", "maps", "honey", "clocks")  # fmt: skip
    asked = ("Tell me about {}.", "Write a short story about {}.", "Give me three facts about {}.")
    for number in range(num_prompts):
        if number % 2 == 0:
            prompts.append(Prompt(rng.choice(asked).format(rng.choice(topics)), is_chat=True))
            continue
        text = prose if number % 4 == 1 else code
        start = text.index("\n", rng.randrange(len(text) - 1000)) + 1
        prompts.append(Prompt(text[start : start + 160].rstrip()))
    return prompts
