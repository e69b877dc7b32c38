"""Chat templates: what transformers' helpers do, and no way to run code or go on for ever."""

from __future__ import annotations

import datetime
import time
import tracemalloc

import pytest

from trivet.checkpoint.template import render_chat
from trivet.errors import RequestError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def _render(source: str, **extra: object) -> str:
    return render_chat(source, MESSAGES, True, {"bos_token": "<s>"}, extra)


def test_blocks_are_trimmed() -> None:
    source = (
        "{{ bos_token }}\n  {% for m in messages %}\n"
        "{{ m.role }}:{{ m['content'] }}\n  {% endfor %}\n"
    )
    assert _render(source) == "<s>\nuser:hi\nassistant:ho\n"


def test_loop_variables_and_controls_work() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ' last' if loop.last }}"
        "{% if loop.first %}{% continue %}{% endif %};{% break %}{% endfor %}"
    )
    assert _render(source) == "1/22/2 last;"


def test_namespace_macro_and_set_blocks_work() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% macro tag(x) %}[{{ x }}]{% endmacro %}"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ tag(m.role ~ ns.n) }}{% endfor %}"
        "{% set body %}{{ ns.n }}!{% endset %}{{ body }}"
    )
    assert _render(source) == "[user1][assistant2]2!"


def test_helpers_of_transformers_are_there() -> None:
    assert _render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi"}'
    assert _render("{{ tools | tojson(indent=1) }}", tools=["\u00e9"]) == '[\n "\u00e9"\n]'
    assert _render("{{ strftime_now('%Y') }}") == str(datetime.date.today().year)
    assert _render("{{ 'a\\nb' | indent(2) }}") == "a\n  b"
    assert _render("{{ messages | length }} {{ ' x ' | trim }}") == "2 x"


def test_generation_blocks_and_absent_tools_are_harmless() -> None:
    source = "{% generation %}{{ messages[1].content }}{% endgeneration %}{{ tools is none }}"
    assert _render(source) == "hoTrue"


def test_raise_exception_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        _render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ nothing.there.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].role.upper() }}",
        "{{ messages | unknown_filter }}",
        "{% include 'other' %}",
        "{{ 'x' + 1 }}",
        "{{ messages[0] | tojson(indent=100000) }}",
        "{% break %}",
        "{% if messages %}{% continue %}{% endif %}",
        "{{ raise_exception('\x00\ud800') }}",
    ],
)
def test_broken_templates_are_request_errors(source: str) -> None:
    with pytest.raises(RequestError, match="chat template failed") as caught:
        _render(source)
    assert str(caught.value).isprintable()


def test_filters_give_what_they_give_elsewhere() -> None:
    source = (
        "{{ messages | map(attribute='role') | join(', ') }} {{ 'aab' | replace('a', 'x', 1) }}"
        " {{ messages | join('+', attribute='content') }} {{ [1, 2] | sum }}"
        " {{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        " {{ [1, 2, 3] | batch(2, 0) | list }} {{ messages | map('length') | sum }}"
        " {{ ['a', 'b'] | map('upper') | list }} {{ nothing | default('d') }}{{ [3, 1] | sort }}"
        " {{ [] | first | default('none') }} {{ 'a' | replace('', '-') }}"
        " {{ '+'.join(['a', 'b']) }} {{ ', '.join(messages | map(attribute='role')) }}"
    )
    assert _render(source) == (
        "user, assistant xab hi+ho 3 1 [[1, 2], [3, 0]] 4 ['A', 'B'] d[1, 3] none -a-"
        " a+b user, assistant"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ messages.append(1) }}",
        "{{ '%s' | format(messages) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | attr('__class__') }}",
    ],
)
def test_python_objects_are_out_of_reach(source: str) -> None:
    try:
        text = _render(source)
    except RequestError:
        return
    assert text == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ ('x' * 50000000) | length }}{{ ('x' * 50000000) | length }}",
        "{{ [0] * 10000000000 }}",
        "{{ 2 ** 99999999999 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ 'x'.ljust(99999999999) }}",
        "{{ 'x'.center(99999999999) }}",
        "{{ 'x' | center(99999999999) }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ ('x' * 9999).replace('x', 'y' * 99999) }}",
        "{% set ns = namespace(s='xx') %}{% for a in range(99) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for a in range(99) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for a in range(99) %}"
        "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for a in range(99) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(n=3) %}{% for a in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{{ range(99999) | map('replace', '1', 'x' * 100000) | list | length }}",
        "{{ ('x' * 9999) | replace('x', 'y' * 99999) | length }}",
        "{{ (['x' * 100000] * 99999) | map('upper') | list | length }}",
        "{{ (['x' * 100000] * 99999) | join | length }}",
        "{{ range(99999) | join('x' * 100000) | length }}",
        "{{ ([[0] * 99999] * 9999) | sum(start=[]) | length }}",
        "{{ [1] | batch(10000000000, 'x') | list | length }}",
        "{{ [1] | slice(10000000000) | list | length }}",
        "{{ 1 | round(10000000000, 'ceil') }}",
        "{% for a in range(99999) %}{{ range(99999) | select('none') | list | length }}{% endfor %}",
        "{% set s = 'a b ' * 500000 %}{% for a in range(99999) %}{{ s | wordcount }}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}{% for a in range(60) %}"
        "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
        "{% set ns = namespace(a=[1]) %}{% for a in range(60) %}"
        "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a | tojson | length }}",
    ],
)
def test_endless_templates_end(source: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RequestError, match="chat template failed"):
        _render(source)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.join(['x' * 100000] * 1500) }}",
        "{{ (['x' * 100000] * 1500) | join }}",
        "{{ ('x' * 100000).join(range(1500) | map('string')) }}",
        "{{ ('x' * 1500) | replace('x', 'y' * 99999) }}",
        "{{ ('x' * 1500).encode().replace('x'.encode(), ('y' * 99999).encode()) }}",
        "{{ ('x' * 1500).translate({120: 'y' * 99999}) }}",
        "{{ '\\t'.expandtabs(tabsize=150000000) }}",
        "{{ (1).to_bytes(150000000, 'big') }}",
    ],
)
def test_what_is_too_large_is_not_made_first(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="exceeds its budget"):
            _render(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_a_long_chat_is_within_the_budget() -> None:
    messages = [{"role": "user", "content": "word " * 2000}] * 2000
    source = (
        "{% for m in messages %}{% for n in messages[:20] %}{% endfor %}"
        "{{ '<' ~ m.role ~ '>' + m.content | trim + '\\n' }}{% endfor %}"
    )
    text = render_chat(source, messages, True, {}, {})
    assert len(text) == 2000 * (9999 + 7)


def test_a_huge_template_is_refused() -> None:
    with pytest.raises(RequestError, match="characters"):
        _render("x" * (1 << 20) + "y")
