"""Forced calls: any text that a style's grammar lets through is read back as calls whose arguments validate."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from hackkv.guide import Guides
from hackkv.packaged import SHIPPED
from hackkv.tokenizer import Tokenizer
from router.api.grammar_child import make_grammar
from router.api.structured import Thinking
from router.api.tools.fields import NO_PARAMETERS, Function
from router.api.tools.machine import CallPiece
from router.api.tools.styles import STYLES, detect, force

EOS = (0, 5)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "city": {"type": "string", "maxLength": 6},
        "days": {"$ref": "#/$defs/days"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
OPTIONAL = {"type": "object", "properties": {"zone": {"type": "null"}}, "additionalProperties": False}
FUNCTIONS = (
    Function(name="weather", parameters=WEATHER, strict=True),
    Function(name="clock", parameters=OPTIONAL),
    Function(name="stop"),
)
SCHEMAS = {function.name: function.parameters or NO_PARAMETERS for function in FUNCTIONS}


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("name", sorted(STYLES))
def test_forced_calls_are_read_back_and_validate(name: str, most: int) -> None:
    guides, tokenizer, style = Guides(SHIPPED, EOS), Tokenizer(SHIPPED), STYLES[name]
    form = force(style, FUNCTIONS, most, lambda marker: json.dumps(f"{marker}"), Thinking.NEVER)
    grammar = make_grammar(form.kind, form.text, form.lenient, form.thinking)
    called = set[str]()
    for seed in range(25):
        guide, rng, output = guides.open(grammar), random.Random(seed), list[int]()
        while not output or output[-1] not in EOS:
            allowed = np.flatnonzero(np.unpackbits(guide.allowed(), bitorder="little"))
            output.append(int(rng.choice(allowed)))
            guide.accept(output[-1])
        parser = style.parser(frozenset(SCHEMAS))
        parts = parser.push(tokenizer.decode(output[:-1])) + parser.finish()
        assert 1 <= parser.calls <= most
        for part in parts:
            assert isinstance(part, CallPiece), parts
            called.add(part.name)
            jsonschema.validate(json.loads(part.arguments), SCHEMAS[part.name])
    assert called == set(SCHEMAS)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{%- if tools %}<tools></tools> ... <tool_call>\\n{\\\"name\\\": <function-name>", "hermes"),
        ('"Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3"),
        ("{{- \"<|python_tag|>\" + tool_call.name }}", "llama3"),
        ("{{- '[AVAILABLE_TOOLS] [' }} ... {{- '[TOOL_CALLS] [' }}", "mistral"),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]", "pythonic"),
        ("{{ tools }}", None),
    ],
)  # fmt: skip
def test_a_chat_template_tells_the_style(template: str, style: str | None) -> None:
    assert detect(template) == style
