"""Templates that want too much get it not, and those of real models render as in plain jinja2."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, pre_tokenizers

from frontend_api.formats.openai import ENDPOINTS
from frontend_api.kv.evidence import State
from frontend_api.kv.listen import Follower
from frontend_api.tokens import chat_template, sandbox
from frontend_api.tokens.chat_template import ChatTemplate, Unrenderable
from frontend_api.tokens.sandbox import Refused
from frontend_api.tokens.segments import Segments
from frontend_api.tokens.tokenizer import Tokenizer
from tests.frontend_api.test_evidence import Fleet
from tests.frontend_api.tiny_model import tiny_tokenizer, write_model

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nReturn {\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{%- if builtin_tools is defined %}{{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\\n\\n"}}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls'] %}{%- if not ns.is_first %}{{'<｜tool▁calls▁begin｜>' + tool['type'] + '\\n' + tool['function']['name'] + '\\n' + (tool['function']['arguments'] | string)}}{%- set ns.is_first = true -%}{%- else %}{{'\\n' ~ tool['function']['name'] ~ loop.index ~ loop.length ~ loop.revindex}}{%- endif %}{%- endfor %}{%- endif %}
{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{'<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}
{%- endfor %}
{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜>'}}{% endif %}
"""
MACROS = """\
{%- macro json_to_python_type(json_spec) %}
{%- set basic = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if basic[json_spec.type] is defined %}{{- basic[json_spec.type] }}
{%- elif json_spec.type == "array" %}{{- "list[" + json_to_python_type(json_spec.get('items', {'type': 'string'})) + "]" }}
{%- elif json_spec.type == "object" %}{{- "dict[" }}{% for k, v in json_spec.properties | items %}{{ k }}: {{ json_to_python_type(v) }}{{ ", " if not loop.last }}{% endfor %}{{- "]" }}
{%- elif json_spec.type is iterable and json_spec.type is not string %}{{- "Union[" }}{%- for t in json_spec.type %}{{- json_to_python_type({"type": t}) }}{%- if not loop.last %}{{- "," }}{%- endif %}{%- endfor %}{{- "]" }}
{%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{%- for tool in tools or [] %}{%- set f = tool.function %}
{{- f.name + "(" + json_to_python_type(f.parameters) + ")" }}
{%- for name, spec in f.parameters.properties.items() | list | sort(attribute='0') %}{{ '%s=%d;' % (name, loop.index) }}{{ spec.type | upper }}{% if spec.enum %}{{ spec.enum | map('string') | join('|') }}{% endif %}{% endfor %}
{% endfor %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ users | length }}{{ users | map(attribute='content') | join(',') }}
{%- for role, group in messages | groupby('role') %}{{ role | title }}={{ group | length }}{% endfor %}
{%- for message in messages if message.role != 'system' %}{{ loop.cycle('a', 'b') }}{{ message.content | replace('e', 'E') | indent(2) | default('none', true) }}{{ loop.previtem.role if loop.previtem is defined }}{% endfor %}
{%- set block %}{% filter upper %}{{ messages[-1].content }}{% endfilter %}{% endset %}{{ block | trim }}
{% macro json_caller() %}{{ caller(7) }}{% endmacro %}{%- call(x) json_caller() %}{{ x }}{% endcall %}
{{- "{} and {}".format(1, 'b') }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 8 }}{{ 3 * 'ab' }}{{ [1, 2] + [3] }}{{ (tools | tojson | safe) ~ 1 }}{{ range(3) | list }}
{{- messages[0] | tojson(indent=2) }}{{ {'a': none, 'b': [true, 1.5]} }}{{ 'x' in 'xyz' and 1 in [1, 2] and messages[0].role in ['user', 'system'] }}{{ messages[0] == messages[-1] }}
{{- [3, 1, 2] | sort | first }}{{ [3, 1] | max }}{{ 'b,a'.split(',') | sort | join }}{{ ' x '.strip() }}{{ [1, 2, 3, 4] | batch(3) | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 2] | sum }}
"""
REAL = {"qwen": QWEN, "llama": LLAMA, "deepseek": DEEPSEEK, "macros": MACROS}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now — <there>",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "enum": ["Zürich", "Bern"]},
                "days": {"type": "array", "items": {"type": "integer"}},
                "how": {"type": "object", "properties": {"exact": {"type": ["boolean", "number"]}}},
            },
        },
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Zürich", "days": [1, 2]}},
}
USER, ANSWER = (
    {"role": "user", "content": "What  is\nthere? <b>"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt is."},
)
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": " Be kind. "}, USER, ANSWER, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": '{"sky": "clear"}'}],
    [{"role": "system", "content": "S"}, USER, ANSWER] + [USER, {**ANSWER, "reasoning_content": "R"}] * 40,
]


def plainly(source: str, messages: list[dict[str, Any]], **variables: Any) -> str | None:
    """As `transformers` renders it; None: it refuses."""
    extensions = [chat_template._Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    environment.globals["raise_exception"] = chat_template._raise
    try:
        return environment.from_string(source).render(messages=messages, bos_token="<s>", **variables)
    except Exception:
        return None


def bounded(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> str | None:
    how = {"documents": None, "add_generation_prompt": True, "continue_final_message": False}
    try:
        return template.render(messages, tools=tools, variables=variables, **how)
    except Unrenderable:
        return None


@pytest.mark.parametrize("tools", [None, [TOOL], [TOOL] * 30], ids=["no-tools", "a-tool", "many-tools"])
@pytest.mark.parametrize("name", REAL)
def test_templates_of_real_models_render_as_without_bounds(name: str, tools: Any) -> None:
    template = ChatTemplate(REAL[name], {"bos_token": "<s>"})
    rendered = [bounded(template, messages, tools) for messages in CONVERSATIONS]
    assert rendered == [
        plainly(REAL[name], messages, tools=tools, documents=None, add_generation_prompt=True)
        for messages in CONVERSATIONS
    ]
    assert any(rendered)
    assert template.strikes == 0


def test_a_conversation_of_any_length_has_its_time_and_room() -> None:
    long = [USER, {"role": "assistant", "content": "a " * 20}] * 3_000
    for name, source in REAL.items():
        if name != "macros":  # whose texts are looked through several times
            assert bounded(ChatTemplate(source, {}), long) is not None, name
    assert bounded(ChatTemplate(QWEN, {}), [{"role": "user", "content": "word " * 400_000}]) is not None


DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}STEP{% endfor %}{{ ns.x | length }}"
NESTED = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}USE"
HOSTILE = [
    "{{ 7 ** 6000000 }}",
    "{{ 7 ** 6000000 > 1 }}",
    "{{ 'x' * 400000000 }}",
    "{{ 400000000 * 'x' }}",
    "{{ ([0] * 400000000) | length }}",
    "{{ ('x' * 1000 * 1000 * 1000) | length }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) if range(99999) | list %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{% for a in range(99999) %}" + "y" * 5_000 + "{% endfor %}",
    "{% set a %}{% for a in range(99999) %}" + "y" * 5_000 + "{% endfor %}{% endset %}{{ a | length }}",
    "{% macro m(n) %}" + "y" * 5_000 + "{% endmacro %}{% for a in range(99999) %}{% set x = m(a) %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n < 40 %}{% set x = m(n + 1) %}{% set x = m(n + 1) %}{% endif %}{% endmacro %}{{ m(0) }}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{% for a in [[1]] recursive %}{{ loop(a) }}{{ loop(a) }}{% endfor %}",
    *(
        DOUBLING.replace("STEP", "{% set ns.x = " + grown + " %}")
        for grown in (
            "ns.x + ns.x", "ns.x ~ ns.x", "ns.x * 2", "'%s%s' % (1, 2)", "'{}{}'.format(ns.x, ns.x)", "ns.x.join([ns.x, ns.x, ns.x])",
            "[ns.x, ns.x] | join", "ns.x.replace('a', ns.x)", "ns.x | replace('a', ns.x)", "'%s%s' | format(ns.x, ns.x)",
            "ns.x | list + ns.x | list", "(ns.x | e).replace('a', '&&')", "(ns.x ~ '\\n') | indent(9999)",
        )
        if grown != "'%s%s' % (1, 2)"
    ),
    DOUBLING.replace("STEP", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    *(
        NESTED.replace("USE", use)
        for use in (
            "{{ ns.x }}", "{{ ns.x | string }}", "{{ ns.x | tojson }}", "{{ ns.x ~ '' }}", "{{ '%s' % ns.x }}", "{{ ns.x | sort }}",
            "{{ ns.x == [ns.x[0], ns.x[0]] }}", "{{ ns.x in [ns.x] }}", "{{ [ns.x] | unique | list }}", "{{ '{}'.format(ns.x) }}",
            "{{ ns.x.index(ns.x[0]) }}", "{{ raise_exception(ns.x | string) }}", "{{ loop.changed(ns.x) }}",
        )
    ),
    *(
        "{% set ns = namespace(x='ab' * 9999) %}{% set f = 'FORMAT' * 9999 %}{{ USE | length }}".replace("FORMAT", form).replace("USE", use)
        for form, use in (
            ("%(a)s", "(f % {'a': ns.x})"), ("%(a)s", "f | format(a=ns.x)"), ("{a}", "f.format(a=ns.x)"), ("{0}", "f.format(ns.x)"),
        )
    ),
    NESTED.replace("USE", "{{ ns }}"),
    NESTED.replace("USE", "{{ [ns] }}"),
    NESTED.replace("USE", "{{ {'a': ns.x}.items() }}"),
    NESTED.replace("USE", "{{ ns.x in {'a': ns.x}.values() | list }}"),
    "{% set n = ('f' * 400000) | int(0, 16) %}{{ n // (n - 1) }}",
    "{{ 0x" + "f" * 100_000 + " // 0x" + "e" * 50_000 + " }}",
    "{{ [messages[0]] * 999 | map(attribute='a.' * 99999 + 'a') | list }}",
    "{{ messages | map(attribute='a.' * 99999 + 'a') | list }}",
    "{{ '%99999999d' % 1 }}",
    "{{ '%*d' % (99999999, 1) }}",
    "{{ '%99999999d' | format(1) }}",
    "{{ '{:>99999999}'.format(1) }}",
    "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 99999999}) }}",
    "{{ 'x'.center(99999999) }}",
    "{{ 'x'.ljust(99999999) }}",
    "{{ 'x'.zfill(99999999) }}",
    "{{ 'a\\tb'.expandtabs(99999999) }}",
    "{{ (1).to_bytes(99999999, 'big') }}",
    "{{ 1.5 | round(99999999, 'ceil') }}",
    "{{ 'x' | center(99999999) }}",
    "{{ 'x' | indent(99999999, true) }}",
    "{{ {'a': 1} | tojson(indent=99999999) }}",
    "{{ [1] | batch(99999999, 'x') | list }}",
    "{{ [1] | slice(99999999) | list }}",
    "{{ [[1]] | sum(start=[]) }}",
    "{{ lipsum(n=99999999) }}",
    "{{ ('x' * 99999).strip('yx' * 99999) }}",
    "{{ strftime_now('%Y' * 9999) }}",
    "{% set t = {'a': 1}.items() | list %}{% set t = t[0] + t[0] %}{{ {t: 1} }}",
    "{% set ns = namespace(t='a,b'.partition(',')) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}{{ {}[ns.t] }}",
    "{% set ns = namespace(t='a,b'.partition(',')) %}{% for i in range(60) %}{% for p in {'a': ns.t}.items() %}{% set ns.t = p + p %}"
    "{% endfor %}{% endfor %}{{ {}[ns.t] }}",
    "{% macro m() %}{% set ns.t = varargs %}{% endmacro %}{{ m(1, 2) }}",
    "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "{{ " + "-" * 30_000 + "1 }}",
    "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "{{ " + "1 + " * 5_000 + "'a' }}",
    "x" * (sandbox.SOURCE_CHARACTERS + 1),
    "{% include 'x' %}",
    "{{ cycler('a').items }}",
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_a_template_that_wants_too_much_gets_it_not(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        template = ChatTemplate(source, {})
    except jinja2.TemplateError:
        return
    for message in (USER, {**USER, "content": "word " * 20_000}):
        assert bounded(template, [message]) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10, "kilobytes"


def test_a_template_that_takes_too_much_again_and_again_is_given_up() -> None:
    template = ChatTemplate("{% if messages | length > 1 %}{{ 'x' * 400000000 }}{% endif %}ok", {})
    for _ in range(2):
        assert bounded(template, [USER, USER]) is None
    assert bounded(template, [USER]) == "ok"
    assert not template.given_up
    for _ in range(2):
        assert bounded(template, [USER, USER]) is None
    assert template.given_up
    assert bounded(template, [USER]) is None


async def test_a_deployment_whose_template_is_given_up_goes_by_load_and_says_why(tmp_path: Path) -> None:
    fleet = Fleet("a1", events="", replay="")
    fleet.publish(tokenizer="a-folder")
    tokens = fleet.cache.tokens = Tokenizer(write_model(tmp_path / "odd", "{{ messages[0].content * 400000000 }}"))
    follower = Follower(fleet.evidence, lambda folder, key: tokens)
    for number in range(3):
        follower._keep_up()
        assert fleet.cache.tokens is tokens
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"a{number}"}]}).encode()
        assert tokens.at_once(ENDPOINTS["/v1/chat/completions"], body) is None
    follower._keep_up()
    assert fleet.standing() == (State.BLIND, {"*": "its chat template takes too much time or room"})


def test_a_tokenizer_that_panics_knows_no_ids_and_ends_no_process() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    with pytest.raises(ValueError, match="fails on this text"):
        Segments(tokenizer, 1_000).encode("a" * 40)


def test_what_the_engine_refuses_is_no_strike() -> None:
    template = ChatTemplate("{{ raise_exception('no') }}", {})
    for _ in range(9):
        assert bounded(template, [USER]) is None
    assert template.strikes == 0


def test_why_a_template_is_not_compiled_is_said() -> None:
    with pytest.raises(Refused, match="recursive loop"):
        ChatTemplate("{% for a in messages recursive %}{% endfor %}", {})
    with pytest.raises(Refused, match="longer than 131072"):
        ChatTemplate("x" * 200_000, {})
