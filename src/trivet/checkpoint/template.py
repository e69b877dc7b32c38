"""Chat templates: sandboxed Jinja with a budget, because a template comes from a downloaded file.

The sandbox keeps templates from reaching Python objects; the budget keeps them from running or
growing for ever. It is charged for every loop turn, call and character, by rewriting the parsed
template: loops iterate through a counting filter, output and concatenation pass a measuring one.
Environment and helpers follow transformers' ``chat_template_utils``.
"""

from __future__ import annotations

import contextvars
import datetime
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from trivet.errors import RequestError, printable

MAX_TEMPLATE_CHARS = 1 << 20
# Budget of one rendering: loop turns and calls; characters, intermediate strings included. Both grow
# with the messages, so that a long chat is no attack and an attack stays short.
BASE_STEPS, STEPS_PER_MESSAGE = 200_000, 500
BASE_CHARS, CHARS_PER_CHAR = 4 << 20, 16
_WIDE_METHODS = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "replace", "join",
     "to_bytes", "translate")
)  # fmt: skip


class _ExhaustedError(Exception):
    """The template used up its budget."""


class _Budget:
    def __init__(self, num_messages: int, num_chars: int) -> None:
        self.steps = BASE_STEPS + STEPS_PER_MESSAGE * num_messages
        self.chars = BASE_CHARS + CHARS_PER_CHAR * num_chars

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _ExhaustedError("too many loop turns and calls")

    def produce(self, num_chars: int) -> None:
        self.chars -= num_chars
        if self.chars < 0:
            raise _ExhaustedError("too many characters")


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("template_budget")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


def _weigh(value: Any) -> None:
    """Charge the characters that ``str(value)`` has at least, before they are made."""
    budget = _budget.get()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            budget.produce(len(item))
        elif isinstance(item, Mapping):
            budget.produce(6 * len(item))
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            budget.produce(3 * len(item))  # a character and what stands between
            pending += item


def _measured(value: Any) -> Any:
    _weigh(value)
    return value


def _concatenated(*values: Any) -> str:
    for value in values:
        _weigh(value)
    return "".join(map(str, values))


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}``, which marks the assistant's text for training; here only its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (the type jinja2 gives it)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if operator == "**":
            raise _ExhaustedError("powers are not allowed")
        if operator == "%" and isinstance(left, str):
            raise _ExhaustedError("printf-style formatting is not allowed")
        if operator == "*":
            counts = [v for v in (left, right) if isinstance(v, int)]
            sized = [v for v in (left, right) if isinstance(v, Sequence)]
            if sized and counts:
                budget.produce(max(0, len(sized[0]) * counts[0]))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, Sequence):
            budget.produce(len(result))
        elif isinstance(result, int) and result.bit_length() > 4096:
            raise _ExhaustedError("a number of more than 4096 bits")
        return result

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        name = getattr(obj, "__name__", "")
        if name in _WIDE_METHODS:
            if name == "join":
                args = tuple(list(_counted(arg)) for arg in args)  # an iterator has no length
            self._charge_wide(budget, name, obj, (*args, *kwargs.values()))
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, (str, bytes)):
            budget.produce(len(result))
        return result

    @staticmethod
    def _charge_wide(budget: _Budget, name: str, obj: Any, args: tuple[Any, ...]) -> None:
        owner = getattr(obj, "__self__", "")
        size = len(owner) if isinstance(owner, (str, bytes)) else 0
        if name in ("format", "format_map", "translate"):
            raise _ExhaustedError(f"str.{name} is not allowed")
        for arg in args:
            if isinstance(arg, int):
                budget.produce(max(0, arg) * (size + 1 if name == "expandtabs" else 1))
            elif isinstance(arg, (str, bytes)):
                budget.produce(len(arg) * (size + 1 if name == "replace" else 1))
            elif name == "join" and isinstance(arg, Sequence):
                _weigh(arg)
                budget.produce(size * len(arg))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _weigh(value)
    if indent is not None and not 0 <= indent <= 16:
        raise _ExhaustedError("tojson indent above 16 is not allowed")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout[:256])


_FORBIDDEN_FILTERS = ("format", "center", "indent", "wordwrap", "filesizeformat", "urlize")


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(width, 256)
    lines = text.splitlines()
    _budget.get().produce(len(text) + len(pad) * len(lines))
    rows = [pad + line if line or blank else line for line in lines]
    if rows and not first:
        rows[0] = lines[0]
    return "\n".join(rows)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    whole, part, instead = str(text), str(old), str(new)
    most = whole.count(part)
    turns = most if count is None or count < 0 else min(count, most)
    _budget.get().produce(turns * len(instead))
    return whole.replace(part, instead, turns)


@jinja2.pass_environment
def _join(
    env: jinja2.Environment, items: Iterable[Any], between: Any = "", attribute: Any = None
) -> str:
    budget, gap = _budget.get(), str(between)
    texts: list[str] = []
    if attribute is not None:
        items = map(jinja2.filters.make_attrgetter(env, attribute), items)
    for item in items:
        _weigh(item)
        budget.produce(len(gap) + 1)
        texts.append(str(item))
    return gap.join(texts)


@jinja2.pass_environment
def _sum(
    env: jinja2.Environment, items: Iterable[Any], attribute: Any = None, start: Any = 0
) -> Any:
    if attribute is not None:
        items = map(jinja2.filters.make_attrgetter(env, attribute), items)
    for item in items:
        start = start + item
        _budget.get().produce(len(start) if isinstance(start, Sequence) else 1)
    return start


# Filters that take as long for a large value as for a small one; that make text of any value; whose
# numbers are sizes of what they make; and that call something for each item.
_CHEAP_FILTERS = frozenset(("attr", "count", "d", "default", "first", "last", "length", "random"))
_TEXT_FILTERS = frozenset(
    ("capitalize", "e", "escape", "forceescape", "lower", "pprint", "replace", "safe", "string",
     "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount", "xmlattr")
)  # fmt: skip
_SIZED_FILTERS = frozenset(("batch", "round", "slice"))
_CALLING_FILTERS = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for each call, for what it reads and for what it makes.

    All filters pass through here, also those that ``map`` calls by name.
    """
    at = 0 if getattr(function, "jinja_pass_arg", None) is None else 1  # where the value is

    @functools.wraps(function)  # keeps jinja2's marks
    def call(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if name in _CHEAP_FILTERS or len(args) <= at:
            return function(*args, **kwargs)
        value = args[at]
        if name in _TEXT_FILTERS and not isinstance(value, str):
            _weigh(value)
        elif isinstance(value, Iterator):
            value = _counted(value)
        elif isinstance(value, Sized):
            budget.produce(len(value) * (4 if name in _CALLING_FILTERS else 1))
        if name in _SIZED_FILTERS:
            for size in (*args[at + 1 :], *kwargs.values()):
                budget.produce(abs(size) if isinstance(size, int) else 0)
        result = function(*args[:at], value, *args[at + 1 :], **kwargs)
        if isinstance(result, Iterator):
            return _counted(result)
        if isinstance(result, Sequence):
            budget.produce(len(result))
        return result

    return call


@functools.cache
def _environment() -> _Environment:
    env = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    for name in _FORBIDDEN_FILTERS:
        env.filters.pop(name, None)
    env.filters["tojson"] = _tojson
    env.filters["indent"] = _indent
    env.filters["replace"] = _replace
    env.filters["join"] = _join
    env.filters["sum"] = _sum
    env.filters.update({name: _charged(name, made) for name, made in env.filters.items()})
    env.filters["_counted"] = _counted
    env.filters["_measured"] = _measured
    env.filters["_concatenated"] = _concatenated
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    for name in ("lipsum", "cycler", "joiner"):
        env.globals.pop(name, None)
    return env


def _filter(name: str, first: nodes.Node, rest: Sequence[nodes.Expr] = ()) -> nodes.Filter:
    assert isinstance(first, nodes.Expr)
    return nodes.Filter(first, name, list(rest), [], None, None, lineno=first.lineno)


def _instrument(node: nodes.Node) -> nodes.Node:
    """Rewrite a parsed template in place so that loops, output and ``~`` are charged."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _instrument(value))
        elif isinstance(value, list):
            value[:] = [_instrument(v) if isinstance(v, nodes.Node) else v for v in value]
    if isinstance(node, nodes.For):
        node.iter = _filter("_counted", node.iter)
    elif isinstance(node, nodes.Output):
        node.nodes = [
            n if isinstance(n, nodes.TemplateData) else _filter("_measured", n) for n in node.nodes
        ]
    elif isinstance(node, nodes.Concat):
        return _filter("_concatenated", node.nodes[0], node.nodes[1:])
    return node


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise jinja2.TemplateError(f"the template has more than {MAX_TEMPLATE_CHARS} characters")
    env = _environment()
    tree = _instrument(env.parse(source))
    assert isinstance(tree, nodes.Template)
    code = env.compile(tree, filename="chat_template")
    return jinja2.Template.from_code(env, code, env.make_globals(None))


def render_chat(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
    extra: Mapping[str, Any],
) -> str:
    """Apply a chat template.

    special_tokens  variables such as ``bos_token``; extra  further template variables.
    Raises RequestError (param ``messages``): the template refuses the messages, is broken, or
    exhausts its budget.
    """
    num_chars = sum(len(str(message)) for message in messages) + len(str(extra))
    token = _budget.set(_Budget(len(messages), num_chars))
    try:
        variables = {
            "tools": None,
            "documents": None,
            **special_tokens,
            **extra,
            "messages": [dict(m) for m in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        return _compile(source).render(variables)
    except (RecursionError, MemoryError) as error:
        reason = f"{type(error).__name__} while rendering"
    except _ExhaustedError as error:
        reason = f"it exceeds its budget: {error}"
    except jinja2.TemplateError as error:
        reason = str(error)
    except SyntaxError as error:  # Python's, of what a tag like a lone break became
        reason = f"a statement is not allowed where it stands: {error.msg}"
    except Exception as error:  # the template is a program: it may raise what there is
        reason = f"{type(error).__name__}: {error}"
    finally:
        _budget.reset(token)
    reason = printable(" ".join(reason.split()), 300)
    raise RequestError(f"messages: the chat template failed: {reason}", "messages")
