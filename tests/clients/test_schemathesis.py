"""Bodies generated from `/openapi.json`, right ones and wrong ones: 5,000 of them, and every answer is as described."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from conftest import serving
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

pytestmark = pytest.mark.timeout(4 * 3600)
"""All routes are one test, which takes an hour where it shares two cores with others."""

CASES = int(os.environ.get("SCHEMATHESIS_CASES", "5000"))
ROUTES = 7
"""Routes with bodies."""
CHOSEN = os.environ.get("SCHEMATHESIS_ROUTES", "")
"""A regular expression: paths that are called, by default all. So the cases can run in pieces."""

CONTEXT = "128"
"""Most right bodies name no bound and are answered until the context is full: a longer one takes hours."""

CALLED = Counter[str]()
"""Cases by route and status."""

GUIDED = r"^(?:guided_|structured_outputs\.)"
SCHEMA = r"^(?:response_format\.json_schema|text\.format|output_config\.format)\.schema: "
UNCOMPILED = (
    r"(?:cannot be compiled: |the grammar cannot go on: |the grammar leaves no token that this model has$"
    r"|is too large or too deeply nested to compile$|takes more than [\d.]+ s to compile$"
    r"|\d+ characters; at most \d+ are compiled$)"
)
"""What the compiler of grammars says of a schema, a regular expression or a grammar that is well formed as a field."""

CROSS_FIELD = re.compile(
    r"is not a token id"
    r"|serves at most"
    r"|sequences asked for at once"
    r"|content: is required"
    r"|best_of: is not supported"
    r"|max_tokens: (may be 0 only|must be at least 1|give max_tokens)"
    r"|top_logprobs: is only allowed"
    r"|continue_final_message"
    r"|chat_template_kwargs"
    rf"|{GUIDED}(?:json|regex|grammar): {UNCOMPILED}|{SCHEMA}{UNCOMPILED}|^tools: {UNCOMPILED}"
    rf"|{GUIDED}json: (?:is not JSON: |a JSON schema is an object$)"
    rf"|{GUIDED}grammar: is not a grammar: "
    r"|the chat template refused|the chat template made an empty prompt"
    r"|exclude each other|tool_choice|tool_calls|two functions have one name|how this model calls them"
    r"|tools: needs messages"
    r"|text.format.(name|schema): is required"
    r"|arguments:? (is not JSON|must be a JSON object)"
    r"|json_schema is required|belongs to type tool"
    r"|messages: (holds nothing|becomes more|ends with calls)|(messages|input) holds nothing"
    r"|tool_use belongs to|tool_result belongs to"
)
"""What is asked of several fields at once, of a grammar's text, or by the model, and so has no place in a schema."""


@pytest.fixture(scope="session")
def document(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[schemathesis.BaseSchema]:
    """What a server without keys says about itself. In the end it is said how many cases there were."""
    with serving(tmp_path_factory.mktemp("open"), "--max-context", CONTEXT) as url:
        found = schemathesis.openapi.from_url(url.removesuffix("/v1") + "/openapi.json")
        # A list that is too long may make a body that is too large; the check does not know that refusal by itself.
        found.config.checks.negative_data_rejection.expected_statuses.append("413")
        yield found
    cases = ", ".join(f"{label} {count}" for label, count in CALLED.items())
    with pytestconfig.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{CALLED.total()} cases: {cases}")


schema = schemathesis.pytest.from_fixture("document")
quiet = settings(
    deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), max_examples=-(-CASES // ROUTES)
)


@schema.include(method="POST", path_regex=CHOSEN).parametrize()
@quiet
def test_bodies(case: schemathesis.Case) -> None:
    check(case)


@schema.include(method="GET").parametrize()
@settings(quiet, max_examples=50)
def test_questions(case: schemathesis.Case) -> None:
    check(case)


def check(case: schemathesis.Case) -> None:
    """Call, and hold the answer against the description."""
    response = case.call(timeout=120)
    CALLED[f"{case.operation.label} {response.status_code}"] += 1
    told = response.status_code == 400 and CROSS_FIELD.search(response.json()["error"]["message"])
    case.validate_response(response, excluded_checks=[positive_data_acceptance] if told else [])
