"""A checkpoint's own template: the names transformers gives it, one begin token, and boundaries found from outside."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError, RequestError
from outrider.server.jinja_template import JinjaRenderer
from outrider.server.messages import Rendered, read_messages, read_tools

SOURCE = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}[S]{{ messages[0].content }}{% set messages = messages[1:] %}{%- endif -%}
{%- if tools -%}[T]{{ tools | tojson }}{%- endif -%}
{%- for message in messages -%}
    {%- if message.content == 'skip' %}{% continue %}{% endif -%}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('role ' + message.role) }}{% endif -%}
    [{{ message.role[0] }}]{{ message.content | trim }}
    {%- for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments.a }}){% endfor -%}
    [/]
{%- endfor -%}
{%- if add_generation_prompt -%}[a]{{ '<think>' if enable_thinking }}{%- endif -%}
"""
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi <b>"}
CALLS = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
SAID = {"role": "assistant", "content": "Yes", "tool_calls": CALLS}
TOOL = {"type": "function", "function": {"name": "f", "description": "<é>"}}


def render(*messages: dict[str, object], source: str = SOURCE, tools: bool = False, think: bool = False) -> Rendered:
    renderer = JinjaRenderer(source, origin="chat_template.jinja", special_tokens={"eos_token": "<eos>"})
    return renderer(
        read_messages(messages),
        read_tools([TOOL] if tools else []),
        enable_thinking=think,
        add_generation_prompt=True,
    )


def test_what_templates_are_given() -> None:
    rendered = render(SYSTEM, USER, SAID, {"role": "user", "content": "skip"}, tools=True, think=True)
    declared = '[{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]'
    assert rendered.text == f"<bos>[S]Be brief.[T]{declared}[u]Hi <b>[/][a]Yes(f )[/][a]<think>"


def test_boundaries() -> None:
    rendered = render(SYSTEM, USER, SAID, USER)
    starts = [rendered.text[:end] for end in rendered.boundaries]
    assert starts == [
        "<bos>[S]Be brief.[u]",
        "<bos>[S]Be brief.[u]Hi <b>[/]",
        "<bos>[S]Be brief.[u]Hi <b>[/][a]Yes(f )[/][u]Hi <b>[/]",
    ]


@pytest.mark.parametrize("start", ["", "<bos>", "<bos><bos>"])
def test_exactly_one_begin_token(start: str) -> None:
    rendered = render(USER, source=start + "{{ messages[0].content }}")
    assert rendered.text == "<bos>Hi <b>"
    assert rendered.boundaries == (5, 11)


def test_a_template_that_rewrites_the_past_has_no_boundaries() -> None:
    source = "{{ messages | length }}{{ messages[0].content }}{{ add_generation_prompt }}"
    assert render(USER, SAID, source=source).boundaries == ()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('no such role') }}", "refused the messages: no such role"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ messages[7].content.x }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "refused the messages"),
        ("{% for i in range(10000000) %}{% endfor %}", "refused the messages"),
    ],
)
def test_failures_are_the_requests(source: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        render(USER, source=source)


def test_a_template_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is not a valid Jinja template"):
        render(USER, source="{% if %}")


def test_equals_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = SOURCE + "{{ strftime_now('%Y') }}{{ [1, {'a': '<'}] | tojson(indent=2) }}"
    plain = [{"role": "user", "content": " a <b> "}, {"role": "assistant", "content": "c"}]
    (wanted,), _ = render_jinja_template(
        conversations=[plain], chat_template=source, add_generation_prompt=True, bos_token="<bos>", enable_thinking=True
    )
    assert render(*plain, source=source, think=True).text == wanted
