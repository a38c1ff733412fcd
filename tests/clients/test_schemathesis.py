"""5,000 valid and invalid bodies, generated from `/openapi.json`. Every answer must be as described there."""

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
"""All routes are one test, which takes an hour on two shared cores."""

CASES = int(os.environ.get("SCHEMATHESIS_CASES", "5000"))
ROUTES = 7
"""Routes with bodies."""
CHOSEN = os.environ.get("SCHEMATHESIS_ROUTES", "")
"""A regular expression of the paths to call, by default all. With it the cases can run in pieces."""

CONTEXT = "128"
"""The context. Most valid bodies set no bound, so answers fill the context: a longer one would take hours."""

CALLED = Counter[str]()
"""Cases by route and status."""

GUIDED = r"^(?:guided_|structured_outputs\.)"
SCHEMA = r"^(?:response_format\.json_schema|text\.format|output_config\.format)\.schema: "
UNCOMPILED = (
    r"(?:cannot be compiled: |the grammar cannot go on: |the grammar leaves no token that this model has$"
    r"|is too large or too deeply nested to compile$|takes more than [\d.]+ s to compile$"
    r"|\d+ characters; at most \d+ are compiled$)"
)
"""Messages of the grammar compiler about a schema, regular expression or grammar that is valid as a field."""

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
"""Messages about rules that no schema can express: on several fields, on a grammar's text, or of the model."""


@pytest.fixture(scope="session")
def document(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[schemathesis.BaseSchema]:
    """The description of a server without keys. At the end, prints the number of cases."""
    with serving(tmp_path_factory.mktemp("open"), "--max-context", CONTEXT) as url:
        found = schemathesis.openapi.from_url(url.removesuffix("/v1") + "/openapi.json")
        # A list that is too long may make the body too large. The check does not expect that refusal by default.
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
    """Make the call and check the answer against the description."""
    response = case.call(timeout=120)
    CALLED[f"{case.operation.label} {response.status_code}"] += 1
    told = response.status_code == 400 and CROSS_FIELD.search(response.json()["error"]["message"])
    case.validate_response(response, excluded_checks=[positive_data_acceptance] if told else [])
