"""The short ways of the sandbox that chat templates run in: what templates see is as without them."""

from pathlib import Path

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import _cached_compile_jinja_template

from megatron_rl_corr.data import template_sandbox
from megatron_rl_corr.data.template_sandbox import TemplateSandbox, shorten

TEMPLATES = Path(__file__).parent / "chat_templates"
VALUES = {
    "text": " a b,c ",
    "message": {"role": "user", "content": "a\n", "items": "shadowed", "_of": 1, "tool_calls": []},
    "messages": [{"content": "x"}, {"content": "{0.__class__}"}, {"content": ""}],
    "own": type("Own", (str,), {"content": "an attribute"})("text"),
}


@pytest.mark.parametrize(
    "source",
    [
        "{{ message.content }}{{ message.role }}{{ message._of }}{{ message['content'] }}",
        "{{ message.missing }}|{{ message.missing is defined }}|{{ message.missing.more }}",
        "{{ message.items() | list }}{{ message.get('role') }}{{ message.get('x', 3) }}",
        "{{ message.pop('role') }}",
        "{{ message.update({'role': 'x'}) }}",
        "{{ message.__class__ }}",
        "{{ message.clear }}|{{ messages.append }}|{{ messages.append(1) }}",
        "{{ text.strip() }}{{ text.split(',')[0] }}{{ text.startswith(' a') }}{{ text.upper().lower() }}",
        "{{ text.__class__.__mro__ }}",
        "{{ text.missing }}|{{ text.missing() }}",
        "{{ text.split(1) }}",
        "{{ text.split(sep=',', maxsplit=1) }}",
        "{{ text.split(_loop_vars=1) }}",
        "{{ '{0}-{x}'.format(text, x=1) }}{{ '{0.__class__}'.format(text) }}{{ '{a}'.format_map({'a': 1}) }}",
        "{{ '{0.__class__}'.format_map({'0': text}) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(text) }}",
        "{{ own.content }}{{ own.upper() }}{{ own.__dict__ }}",
        "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}"
        "{{ loop.revindex }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ m.content.strip('x') }}"
        "{{ loop.cycle('a', 'b') }}{{ loop.changed(m) }}{{ loop._iterable }}{{ loop.missing }}{% endfor %}",
        "{% for m in messages %}{{ m.content.format(m) }}{% endfor %}",
        "{% set ns = namespace(a=1) %}{% set ns.a = text.count('a') %}{{ ns.a }}",
        "{% set ns = namespace(a=true, b=text.split, c='{0.__class__}'.format, d=none, f=message) %}"
        "{{ ns.a }}|{{ ns.b(',') }}|{{ ns.c(text) }}|{{ ns.d }}|"
        "{{ ns.e is defined }}|{{ ns.f.role }}|{{ ns['a'] }}",
        "{% set ns = namespace(_a=1) %}{{ ns._a }}|{{ ns.__class__ }}|{{ ns._Namespace__attrs }}",
        "{% macro f(x) %}{{ x.strip() }}{% endmacro %}{{ f(text) }}{% call f(text) %}{% endcall %}",
        "{{ messages | map(attribute='content') | join }}{{ text | replace('a', 'b') }}",
        "{{ cycler('a').next() }}{{ range(3) | list }}{{ dict(a=1).a }}{{ joiner()() }}",
        "{{ (1).real }}{{ none.x }}{{ undefined_name.x }}",
    ],
)
def test_template_when_rendered_in_either_sandbox_then_the_text_or_the_error_is_one(source):
    seen = [rendered(kind(), source) for kind in (ImmutableSandboxedEnvironment, TemplateSandbox)]
    assert seen[0] == seen[1]


def rendered(environment, source):
    try:
        return environment.from_string(source).render(**VALUES)
    except Exception as error:  # noqa: BLE001  whichever it is, it is the same
        return type(error), str(error)


def test_short_ways_when_taken_then_the_general_one_is_not(monkeypatch):
    asked = []
    general = ImmutableSandboxedEnvironment.is_safe_callable
    monkeypatch.setattr(
        template_sandbox.TemplateSandbox,
        "is_safe_callable",
        lambda self, obj: asked.append(obj) or general(self, obj),
    )
    source = "{% for m in messages %}{{ m.content.strip() }}{% if loop.first %}{{ text.upper() }}{% endif %}"
    assert TemplateSandbox().from_string(source + "{% endfor %}").render(**VALUES) == "x A B,C {0.__class__}"
    assert asked == []


def test_shorten_when_the_sandbox_is_another_kind_then_it_stays():
    class Other(ImmutableSandboxedEnvironment):
        pass

    other, usual = Other(), ImmutableSandboxedEnvironment()
    shorten(other)
    shorten(usual)
    assert type(other) is Other and type(usual) is TemplateSandbox


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": " how many? <b> "},
    {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\nthree"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "thanks"},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
]


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_published_template_when_rendered_in_either_sandbox_then_the_text_is_one(path, tools):
    compiled = [_cached_compile_jinja_template(path.read_text()) for _ in range(2)]
    shorten(compiled[1].environment)
    what = {"messages": CONVERSATION, "tools": tools, "add_generation_prompt": True, "bos_token": "<s>"}
    texts = []
    for one in compiled:
        try:
            texts.append(one.render(**what))
        except TemplateError as error:  # it takes no system message, say
            texts.append(str(error))
    assert texts[0] == texts[1] != ""
