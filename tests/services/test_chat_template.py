"""Chat templates against `transformers`' own rendering, and within their bounds."""

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from kvmanager.errors import PagekeeperError
from services.text import chat_template
from services.text.chat_template import ChatTemplate
from services.text.model_files import ModelError
from tests.services.tokenizer_samples import packaged_tokenizer

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
SMOLLM2 = packaged_tokenizer().chat_template or ""
HEADERS = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['user', 'assistant', 'system'] %}
        {{- raise_exception('no such role: ' + message['role']) }}
    {%- endif %}
<|{{ message.role }}|>
{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
FEATURES = """{% set ns = namespace(last=messages[0]) %}
    {% for message in messages %}
        {% if message.skip is defined %}{% continue %}{% endif %}
        {% set ns.last = message %}
{{ message | tojson }}
    {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}
        {% if loop.index > 5 %}{% break %}{% endif %}
    {% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for i in range(3) %}{{ i }}{% endfor %}
{{ ns.last.content[:2] | upper }}{{ strftime_now('%Y') }}<é&>"""
TEMPLATES = [SMOLLM2, HEADERS, FEATURES]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=20)},
        optional={"skip": st.booleans()},
    ),
    min_size=1,
    max_size=8,
)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def refused(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """The message of the refusal."""
    with pytest.raises(PagekeeperError) as caught:
        ChatTemplate(source, NAMED).render(messages, **options)
    assert caught.value.code == "invalid_request"
    return caught.value.message


@pytest.mark.parametrize("source", TEMPLATES, ids=["smollm2", "headers", "features"])
@pytest.mark.parametrize("prompt", [True, False])
@given(messages=MESSAGES)
def test_the_prompt_is_what_transformers_renders(
    source: str, prompt: bool, messages: list[dict[str, Any]]
) -> None:
    expected, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=prompt, **NAMED
    )
    assert ChatTemplate(source, NAMED).render(messages, prompt) == expected[0]


@pytest.mark.parametrize("source", [SMOLLM2, HEADERS], ids=["smollm2", "headers"])
@given(messages=MESSAGES)
def test_a_continued_message_ends_where_transformers_ends_it(
    source: str, messages: list[dict[str, Any]]
) -> None:
    expected, _ = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True, **NAMED
    )
    rendered = ChatTemplate(source, NAMED).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected[0]


def test_the_packaged_models_prompt() -> None:
    assert ChatTemplate(SMOLLM2, {}).render([{"role": "system", "content": "Be brief."}, *user("Hi")]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate(HEADERS, NAMED)
    assert template.render(user(parts)) == template.render(user("a\nb"))
    assert template.render(user(None)) == template.render(user(""))


def test_further_names_reach_the_template() -> None:
    template = ChatTemplate("{{ tools | tojson }}{{ documents }}{{ name }}", {})
    assert template.render(user(""), tools=[{"ü": "<"}], name="x") == '[{"ü": "<"}]Nonex'
    assert json.loads(ChatTemplate("{{ messages | tojson }}", {}).render(user("a"))) == user("a")


def test_the_year_is_this_one() -> None:
    years = {str(datetime.now().year), ChatTemplate("{{ strftime_now('%Y') }}", {}).render(user(""))}
    assert years <= {str(datetime.now().year), str(datetime.now().year - 1)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": "x"}], "'image_url' is not supported"),
        (["text"], "'str' is not supported"),
        ([{"type": "text"}], "has no text"),
        (5, "content is a int"),
    ],
)
def test_content_that_is_not_text_is_refused_by_name(content: Any, message: str) -> None:
    assert message in refused(HEADERS, user(content))


def test_what_the_template_refuses_is_passed_on() -> None:
    assert "no such role: tool" in refused(HEADERS, [{"role": "tool", "content": ""}])


def test_a_message_that_is_not_shown_cannot_be_continued() -> None:
    source = "{{ messages[0].content }}"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert "leaves out" in refused(source, user("a") + user("b"), **options)
    assert "exclude each other" in refused(source, user("a"), continue_final_message=True)


def test_a_template_that_is_none_is_refused_at_start() -> None:
    with pytest.raises(ModelError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}", "loops more than"),
        ("{% for i in range(999999) %}{{ 'aaaaaaaa' }}{% endfor %}", "output is far longer"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(10 ** 30) | length }}", "int"),
        ("{{ none.x.y }}", "no attribute"),
    ],
)
def test_templates_that_misbehave_are_stopped(source: str, message: str) -> None:
    assert message in refused(source, user("a"))


def test_a_template_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.0)
    clock = iter(range(100))
    monkeypatch.setattr(chat_template.time, "monotonic", lambda: next(clock))
    assert "takes more than" in refused(HEADERS, user("a"))


@pytest.mark.parametrize("count", [0, chat_template.MAX_MESSAGES + 1])
def test_no_messages_or_too_many_are_refused(count: int) -> None:
    assert f"{count} messages" in refused(HEADERS, user("a") * count)
