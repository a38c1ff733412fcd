"""Chat templates render as in transformers, and reach nothing outside their sandbox."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from hackkv.chat_template import ChatTemplate
from hackkv.packaged import SHIPPED

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "shipped": (SHIPPED / "chat_template.jinja").read_text(encoding="utf-8"),
    "chatml": (
        "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] "
        "+ '<|im_end|>' + '\\n' }}\n{% endfor %}\n{% if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n{% endif %}\n"
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
        "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
    ),
    "namespace, dict, tojson": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ dict(m, n=ns.n) | tojson }}{{ m | tojson(indent=2) }}{% endfor %}"
        "{{ 'tools' if tools else 'none' }}{{ shout | default('-') }}"
    ),
    "generation": (
        "{% for m in messages %}{% generation %}{% set inner = 1 %}<{{ m.content }}>{% endgeneration %}"
        "{{ inner | default('unset') }}{% endfor %}"
    ),
    "drops the last": "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=12)},
        optional={"name": st.one_of(st.none(), st.just("Ann"))},
    ),
    min_size=1,
    max_size=4,
)


def theirs(source: str, messages: list[dict[str, Any]], generate: bool, go_on: bool, arguments: dict[str, Any]) -> str:
    """The text that transformers' `apply_chat_template` renders with these arguments."""
    kept = [{name: value for name, value in message.items() if value is not None} for message in messages]
    rendered: Any = render_jinja_template(
        [kept],
        chat_template=source,
        add_generation_prompt=generate,
        continue_final_message=go_on,
        **{**TOKENS, **arguments},
    )
    return str(rendered[0][0])


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
@given(messages=MESSAGES, end=st.sampled_from(["generate", "go on", "close"]), shout=st.sampled_from([None, "é!"]))
def test_the_text_is_that_of_transformers(
    source: str, messages: list[dict[str, Any]], end: str, shout: str | None
) -> None:
    generate, go_on = end == "generate", end == "go on"
    arguments = {"shout": shout} if shout else {}
    template = ChatTemplate(source, TOKENS)

    def ours() -> str:
        return template.render(
            messages, add_generation_prompt=generate, continue_final_message=go_on, arguments=arguments
        )

    try:
        expected = theirs(source, messages, generate, go_on, arguments)
    except (ValueError, jinja2.TemplateError):
        with pytest.raises((ValueError, jinja2.TemplateError)):
            ours()
    else:
        assert ours() == expected


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages.__class__.__mro__ }}", "__class__|unsafe"),
        ("{{ dict.__init__.__globals__ }}", "__init__|unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "__class__"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "_x"),
        ("{{ cycler.__init__.__globals__.os }}", "__init__|unsafe"),
    ],
)
def test_a_template_that_leaves_its_sandbox_is_refused(source: str, error: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(jinja2.TemplateError, match=error):
        template.render(
            [{"role": "user", "content": ""}], add_generation_prompt=False, continue_final_message=False, arguments={}
        )


@pytest.mark.parametrize(
    ("messages", "generate", "error"),
    [
        ([], False, "no message"),
        ([{"role": "user", "content": "a"}], True, "exclude each other"),
        ([{"role": "user"}], False, "no text"),
    ],
)
def test_what_cannot_be_continued_is_named(messages: list[dict[str, object]], generate: bool, error: str) -> None:
    template = ChatTemplate(TEMPLATES["chatml"], {})
    with pytest.raises(ValueError, match=error):
        template.render(messages, add_generation_prompt=generate, continue_final_message=True, arguments={})


def test_the_clock_is_known() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    text = template.render([{"role": "user"}], add_generation_prompt=False, continue_final_message=False, arguments={})
    assert text.isdecimal()
