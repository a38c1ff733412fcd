"""Forms become grammars in a child process. A hostile form may kill it: the router names that form and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hackkv.errors import Overloaded, RequestError, Unavailable
from hackkv.packaged import SHIPPED
from router.api.grammars import MAX_WAITING, Grammars
from router.api.structured import Form, FormKind, Structured, Thinking

COMPILE_S = 60.0
DEEP = "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(6000)) + '\nr6000: "a"'


def form(kind: FormKind, text: str, lenient: bool = False) -> Form:
    return Form(kind, text, "guided_field", lenient)


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    """Grammars of the model in the repository."""
    made = Grammars(SHIPPED, COMPILE_S)
    yield made
    await made.close()


REFUSED = [
    (form(FormKind.REGEX, "[0-9"), "unclosed character class"),
    (form(FormKind.REGEX, r"(a)\1"), "backreferences are not supported"),
    (form(FormKind.GRAMMAR, "start: nothing"), 'unknown name: "nothing"'),
    (form(FormKind.GRAMMAR, "root ::= ((("), "is not a grammar"),
    (form(FormKind.JSON, "{"), "is not JSON"),
    (form(FormKind.JSON, "[]"), "a JSON schema is an object"),
    (form(FormKind.JSON, '{"type": 12}'), "type must be a string"),
    (form(FormKind.JSON, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    (form(FormKind.JSON, '{"type": "string", "enum": [1]}'), "Unsatisfiable"),
    (form(FormKind.JSON, json.dumps({"enum": ["x" * 70_000, "y" * 70_000]})), "characters; at most"),
    (form(FormKind.GRAMMAR, DEEP), "too deeply nested"),
]


async def test_what_cannot_be_compiled_is_refused_by_name_and_the_next_one_compiles(grammars: Grammars) -> None:
    for refused, why in REFUSED:
        with pytest.raises(RequestError, match=why) as refusal:
            await grammars.grammar(refused)
        assert refusal.value.param == "guided_field"
        assert "[a-z]" in await grammars.grammar(form(FormKind.REGEX, "[a-z]+"))


async def test_lenient_forms_ignore_what_cannot_be_enforced(grammars: Grammars) -> None:
    assert await grammars.grammar(form(FormKind.JSON, '{"type": "array", "uniqueItems": true}', lenient=True))


async def test_a_grammar_that_takes_too_long_ends_its_child_only() -> None:
    hasty = Grammars(SHIPPED, 0.2)
    try:
        child = await hasty._started()
        child.send_signal(signal.SIGSTOP)  # a stopped child cannot answer in time
        # Other threads of the child run on until the thread that got the signal has handled it.
        await asyncio.wait_for(asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WSTOPPED), COMPILE_S)
        with pytest.raises(RequestError, match=r"more than 0\.2 s"):
            await hasty.grammar(form(FormKind.REGEX, "[a-z]"))
        assert child.returncode == -signal.SIGKILL
        assert hasty._child is None
    finally:
        await hasty.close()


async def test_who_asks_for_the_same_gets_one_verdict_and_who_leaves_takes_none_away(grammars: Grammars) -> None:
    same = form(FormKind.CHOICE, '["yes", "no"]')
    asking = [asyncio.create_task(grammars.grammar(same)) for _ in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()
    assert len(grammars._verdicts) == 1
    first, second = await asyncio.gather(*asking[1:])
    assert first == second == await grammars.grammar(same)


async def test_the_line_is_bounded(grammars: Grammars) -> None:
    waiting = [asyncio.create_task(grammars.grammar(form(FormKind.REGEX, f"a{at}"))) for at in range(MAX_WAITING)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await grammars.grammar(form(FormKind.REGEX, "b"))
    assert len(await asyncio.gather(*waiting)) == MAX_WAITING


async def test_a_tokenizer_that_cannot_be_read_is_no_fault_of_the_client(tmp_path: Path) -> None:
    broken = Grammars(tmp_path, COMPILE_S)
    with pytest.raises(Unavailable, match="cannot be compiled for this model"):
        await broken.grammar(form(FormKind.REGEX, "a"))
    await broken.close()


@pytest.mark.parametrize("thinking", [Thinking.OPEN, Thinking.MAYBE])
async def test_thoughts_come_before_the_form(grammars: Grammars, thinking: Thinking) -> None:
    grammar = await grammars.grammar(Form(FormKind.REGEX, "[0-9]{2}", "guided_regex", thinking=thinking))
    assert "</think>" in grammar.replace("\\", "")


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({"response_format": {"type": "json_object"}}, FormKind.JSON, "response_format"),
        ({"guided_json": {"type": "null"}}, FormKind.JSON, "guided_json"),
        ({"guided_json": '{"type": "null"}'}, FormKind.JSON, "guided_json"),
        ({"guided_regex": "a"}, FormKind.REGEX, "guided_regex"),
        ({"guided_choice": ["a", "b"]}, FormKind.CHOICE, "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, FormKind.GRAMMAR, "guided_grammar"),
        ({"structured_outputs": {"json": {"type": "null"}}}, FormKind.JSON, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, FormKind.JSON, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["a"]}}, FormKind.CHOICE, "structured_outputs.choice"),
    ],
)
def test_every_field_says_its_form(body: dict[str, object], kind: FormKind, param: str) -> None:
    found = Structured.model_validate_json(json.dumps(body)).form()
    assert found is not None
    assert (found.kind, found.param, found.lenient) == (kind, param, False)


def test_only_strict_schemas_promise_every_keyword() -> None:
    for strict in (None, False, True):
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": strict}}
        found = Structured.model_validate_json(json.dumps({"response_format": asked})).form()
        assert found is not None
        assert found.lenient is (strict is not True)
