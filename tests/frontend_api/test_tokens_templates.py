"""Which form of content a template takes, and what it may do."""

from __future__ import annotations

from typing import Any

import pytest

from frontend_api.tokens.chat_template import ChatTemplate, Unrenderable

LOOP = "{% for m in messages %}"
FORMS = [
    (LOOP + "{{ m.content }}{% endfor %}", False),
    (LOOP + "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
    (LOOP + "{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}", True),
    (LOOP + "{% for part in m.content | selectattr('type') %}{% endfor %}{% endfor %}", True),
    ("{% for m in messages[1:] %}{% for part in m.content %}{% endfor %}{% endfor %}", True),
    ("{% set rest = messages[1:] %}{% for m in rest %}{% for part in m.content %}{% endfor %}{% endfor %}", True),
    ("{% set a = messages %}{% set b = a | list %}{% for m in b %}{% for p in m.content %}{% endfor %}{% endfor %}", True),
    (LOOP + "{% set content = m.content %}{% for part in content %}{% endfor %}{% endfor %}", True),
    (LOOP + "{% set parts = m.content %}{% for part in parts %}{% endfor %}{% endfor %}", False),
    ("{% macro show(c) %}{% for part in c %}{% endfor %}{% endmacro %}" + LOOP + "{{ show(m.content) }}{% endfor %}", True),
    ("{% macro show(c) %}{% for part in c %}{% endfor %}{% endmacro %}" + LOOP + "{{ show(c=m.content) }}{% endfor %}", True),
    ("{% macro show(c) %}{% for part in c %}{% endfor %}{% endmacro %}" + LOOP + "{{ show(m.role) }}{% endfor %}", False),
    ("{% macro show(content) %}{% for part in content %}{% endfor %}{% endmacro %}" + LOOP + "{{ m.role }}{% endfor %}", False),
    (LOOP + "{% for call in m.tool_calls %}{% endfor %}{% endfor %}", False),
    (LOOP + "{% for key, value in m.content %}{% endfor %}{% endfor %}", False),
    ("{% set ns = namespace() %}{% set ns.all = messages %}" + LOOP + "{% for p in m.content %}{% endfor %}{% endfor %}", False),
]  # fmt: skip


@pytest.mark.parametrize(("source", "parts"), FORMS)
def test_the_form_of_content_is_the_engines_guess(source: str, parts: bool) -> None:
    assert ChatTemplate(source, {}).takes_parts is parts


def render(source: str, *messages: dict[str, Any], **changed: Any) -> str:
    fields: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
    fields |= {"continue_final_message": False, "variables": {}}
    conversation = list(messages) or [{"role": "user", "content": "Hi "}]
    return ChatTemplate(source, {"bos_token": "<s>"}).render(conversation, **fields | changed)


RENDERED = [
    ("{{ bos_token }}{{ eos_token }}", "<s>"),
    ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
    ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
    ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
    ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi "),
    ("  {% if add_generation_prompt %}\nx\n  {% endif %}\ny", "x\ny"),
    ("{{ strftime_now('%%') }}", "%"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "text"), RENDERED)
def test_templates_have_what_transformers_gives_them(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1] }}",
        "{{ 1 + 'a' }}",
        "{{ missing.attribute }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_what_a_template_may_not_do_is_unrenderable(source: str) -> None:
    with pytest.raises(Unrenderable):
        render(source)


SHOWN = "{% for m in messages %}[{{ m.content.strip() if strip else m.content }}]{% endfor %}"


def test_a_message_to_continue_ends_the_text() -> None:
    changed = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(SHOWN, **changed) == "[Hi "
    assert render(SHOWN, **changed, variables={"strip": True}) == "[Hi"
    with pytest.raises(Unrenderable):
        render(SHOWN, continue_final_message=True)
    with pytest.raises(Unrenderable):
        render("content{{ messages | length }}", **changed)


def test_the_conversation_is_left_as_it_was() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert render(source, message, add_generation_prompt=False, continue_final_message=True) == "a"
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}


def test_a_developer_is_a_system_message_unless_the_template_knows_better() -> None:
    developer = {"role": "developer", "content": "D", "tools": None}
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}"
    user = {"role": "user", "content": "U"}
    assert render(source, developer, user) == "system:D user:U "
    assert render(source, user, developer) == "system:D user:U "
    assert render(source, {"role": "system", "content": "S"}, user, developer) == "system:S\n\nD user:U "
    assert render("{# 'developer' #}" + source, user, developer) == "user:U developer:D "


def test_a_template_that_wants_its_system_message_first() -> None:
    assert not ChatTemplate(SHOWN, {}).system_first
    guarded = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    )
    assert ChatTemplate(guarded + "{% endfor %}", {}).system_first
