"""Turns what clients ask for into grammars, in a process of its own: `python -m router.api.grammar_child FOLDER`.

A grammar may be hostile. Compiling it may take long, take gigabytes, or overflow the stack, which ends the process.
So the router lets this process try first (`router.api.grammars`), with less stack and memory than a node has. A grammar
that compiles here compiles on nodes.

Each line of the standard input is a form, as JSON; each line of the output its grammar or why there is none.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import llguidance
from llguidance import LLMatcher

from hackkv.errors import GuideError, RequestError
from hackkv.guide import Guides
from hackkv.types import MAX_GRAMMAR_CHARS
from router.api.calendar_formats import with_patterns
from router.api.written_json import guidance

STACK_BYTES = 1 << 20
MEMORY_BYTES = 4 << 30

_TOOL_SCHEMA = re.compile(r"^(\w+: %json )(.*)$", re.MULTILINE)
"""Parameters of a tool as `router.api.tools.styles` writes them: a rule of their own, on one line."""
_THINK = "think[lazy]: /(.|\\n)*<\\/think>/"
_BREAK = "/\\n{0,2}/"
_STARTS = {
    "open": f"start: think {_BREAK} @body\n{_THINK}",
    "maybe": f'start: ("<think>" think {_BREAK})? @body\n{_THINK}',
}


def make_grammar(kind: str, text: str, lenient: bool, thinking: str) -> str:
    """The grammar, in llguidance's form, of a `router.api.structured.Form`. Raises `RequestError`."""
    body = _body(kind, text, lenient)
    if thinking == "never":
        grammars = [body]
    else:
        grammars = [{"name": "main", "lark_grammar": _STARTS[thinking]}, {"name": "body", **body}]
    grammar = json.dumps({"grammars": grammars})
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"{len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are compiled")
    return grammar


def _body(kind: str, text: str, lenient: bool) -> dict[str, Any]:
    if kind == "json":
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"is not JSON: {error}") from error
        if not isinstance(schema, dict):
            raise RequestError("a JSON schema is an object")
        return {"json_schema": {**with_patterns(schema), "x-guidance": guidance(lenient)}}
    if kind == "lark":
        return {"lark_grammar": _TOOL_SCHEMA.sub(_told_calendar, text)}
    if kind == "regex":
        body: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]
        return {"lark_grammar": body["lark_grammar"]}
    try:
        return {"lark_grammar": llguidance.grammar_from("choice" if kind == "choice" else "grammar", text)}
    except Exception as error:  # the converter of GBNF raises whatever its parser meets
        raise RequestError(f"is not a grammar: {error}") from error


def _told_calendar(rule: re.Match[str]) -> str:
    """A rule of a tool's parameters that takes only dates of the calendar (`with_patterns`)."""
    return rule[1] + json.dumps(with_patterns(json.loads(rule[2])))


def _answer(guides: Guides, line: str) -> dict[str, str]:
    try:
        grammar = make_grammar(**json.loads(line))
        guides.open(grammar).allowed()
    except (RequestError, GuideError) as error:
        return {"error": str(error)}
    return {"grammar": grammar}


def _serve(guides: Guides) -> None:
    for line in sys.stdin:
        print(json.dumps(_answer(guides, line)), flush=True)


def main(folder: str) -> None:
    """Serve until the standard input ends. The first line of the output says that the tokenizer is read."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    guides = Guides(Path(folder))
    guides.open('start: ""')
    print(json.dumps({}), flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(guides,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
