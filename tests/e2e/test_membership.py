"""Nodes that die, come back, do not fit, or are listed in the configuration, as real processes.

The fleet runs the paper's settings with sums on the wire, the largest form of the 2-bit codec.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import validate

from tests.e2e.processes import START_S, Api, Fleet, check_weight, role, until
from tests.router.processes import NO_TLS

LEASE_S = 3.0
CODEC = {"name": "hack-paper", "settings": {"page_tokens": 64, "send_sums": True}}
PROMPT = list(range(3, 103))
ANSWER_TOKENS, FEW_TOKENS = 200, 8


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["alone", "2 workers"])
def paper(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Router, one prefill and two decode processes. Equal prompts go to all nodes, not only to those that hold them."""
    router = {
        "lease_ttl_s": LEASE_S,
        "served_model_name": "tiny",
        "shutdown_grace_s": 0.5,
        "prefix_dispatch": False,
        "workers": request.param,
    }
    running = Fleet(tmp_path_factory.mktemp("paper"), checkpoint, CODEC, router, num_decode=2)
    yield running
    running.stop()


def decode_nodes_of(api: Api, requests: int) -> set[str]:
    """The decode nodes that serve the next few requests."""
    return {api.complete(PROMPT)["hackkv"]["decode_node"] for _ in range(requests)}


def test_sums_on_the_wire_stay_below_0165_of_fp16(paper: Fleet) -> None:
    check_weight(paper.api, most=0.165)


def wait_until_no_page_is_held(api: Api) -> None:
    """Wait until neither of the two decode nodes holds a page."""
    used = [f'hackkv_kv_pages{{node="decode-{i}",role="decode",state="used"}}' for i in range(2)]
    until(lambda: [api.metrics()[name] for name in used] == [0, 0], START_S, "no page is held any more")


def generated(api: Api) -> float:
    """The number of tokens that the two decode nodes have generated, by their last reports."""
    metrics = api.metrics()
    return sum(metrics[f'hackkv_generated_tokens_total{{node="decode-{i}"}}'] for i in range(2))


SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 70, "maxItems": 70}
GUIDED = {"guided_json": SCHEMA, "ignore_eos": False}
"""Settings of an answer of about two hundred tokens."""


@pytest.mark.parametrize("more", [{}, pytest.param(GUIDED, marks=pytest.mark.slow)], ids=["free", "guided"])
def test_a_killed_decode_node_costs_no_token_and_comes_back(paper: Fleet, more: dict[str, Any]) -> None:
    most = 2 * ANSWER_TOKENS if more else ANSWER_TOKENS
    calm = paper.api.complete(PROMPT, most, **more)["choices"][0]
    if more:
        validate(json.loads(calm["text"]), SCHEMA)
    expected, victim = calm["token_ids"], paper.decode[1]

    held = 'hackkv_node_tokens{node="decode-1",role="decode"}'
    with paper.api.asked(4, PROMPT, most, **more) as answers:
        until(lambda: paper.api.metrics().get(held), START_S, "decode-1 has work")
        victim.kill()
        until(lambda: paper.api.nodes["decode"] == 1, START_S, "the router drops the dead node")
        until(lambda: any(answer["hackkv"]["attempts"] > 1 for answer in answers), START_S, "another does its work")
    # Requests of the dead node were decoded again elsewhere, after the tokens that were sent already.
    assert len(answers) >= 4
    assert all(answer["choices"][0]["token_ids"] == expected for answer in answers)
    again = {answer["hackkv"]["decode_node"] for answer in answers if answer["hackkv"]["attempts"] > 1}
    assert again == {"decode-0"}
    assert decode_nodes_of(paper.api, 2) == {"decode-0"}

    paper.decode[1] = paper.node("decode", "decode-1")
    until(lambda: paper.api.nodes["decode"] == 2, START_S, "the restarted node is taken back")
    until(lambda: "decode-1" in decode_nodes_of(paper.api, 2), START_S, "the restarted node serves")


def test_a_killed_prefill_node_costs_nothing(paper: Fleet) -> None:
    """Prompts that the node runs go to another one, and requests that it has prefilled go on. No client notices."""
    prompt = PROMPT * 20
    expected = paper.api.complete(prompt, FEW_TOKENS)["choices"][0]["token_ids"]
    victim = paper.node("prefill", "prefill-1")
    until(lambda: paper.api.nodes["prefill"] == 2, START_S, "the new node is registered")

    held = 'hackkv_node_tokens{node="prefill-1",role="prefill"}'
    with paper.api.asked(4, prompt, FEW_TOKENS) as answers:
        until(lambda: paper.api.metrics().get(held), START_S, "prefill-1 has work")
        victim.kill()
        until(lambda: paper.api.nodes["prefill"] == 1, START_S, "the router drops the dead node")
        until(lambda: any(answer["hackkv"]["attempts"] > 1 for answer in answers), START_S, "another does its work")
    assert len(answers) >= 4
    assert all(answer["choices"][0]["token_ids"] == expected for answer in answers)


@pytest.mark.slow
def test_a_restarted_router_finds_its_nodes_again(paper: Fleet) -> None:
    """A client that is being served when the router ends gets an error. The nodes free its request and register again,
    and the next request is served."""
    expected = paper.api.complete(PROMPT)["choices"][0]["token_ids"]
    wait_until_no_page_is_held(paper.api)
    before, most = generated(paper.api), 4000
    body = {"prompt": PROMPT, "max_tokens": most, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{paper.api.url}/v1/completions", json=body, timeout=START_S) as response:
        events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        assert json.loads(next(events))["choices"]
        paper.router.process.terminate()
        told = [json.loads(event) for event in events if event != "[DONE]"][-1]
    assert told["error"]["message"] == "the router stopped before the request was complete"

    paper.restart_router()
    until(lambda: paper.api.nodes == {"prefill": 1, "decode": 2}, START_S, "the nodes register again")
    assert paper.api.complete(PROMPT)["choices"][0]["token_ids"] == expected
    wait_until_no_page_is_held(paper.api)
    assert generated(paper.api) - before < most - 1, "nobody reads that answer: it is not decoded to its end"


@pytest.mark.slow
@pytest.mark.parametrize("drain_s", [START_S, 0.0], ids=["finishes", "hands over"])
@pytest.mark.parametrize(("role", "others", "prompt"), [("decode", 2, PROMPT), ("prefill", 1, PROMPT * 20)])
def test_a_node_that_is_asked_to_stop_costs_nothing(
    paper: Fleet, role: str, others: int, prompt: list[int], drain_s: float
) -> None:
    """The node leaves the fleet at once, finishes its requests or lets another node go on with them, and exits with 0.

    For a prefill node these are prompts that it runs or has just run, and requests that are being decoded.
    """
    expected = paper.api.complete(prompt, ANSWER_TOKENS)["choices"][0]["token_ids"]
    name = f"{role}-{others}"
    leaver = paper.node(role, name, drain_s=drain_s)
    until(lambda: paper.api.nodes[role] == others + 1, START_S, "the new node is registered")

    held = f'hackkv_node_tokens{{node="{name}",role="{role}"}}'
    with paper.api.asked(6, prompt, ANSWER_TOKENS) as answers:
        until(lambda: paper.api.metrics().get(held), START_S, f"{name} has work")
        leaver.process.terminate()
        until(lambda: paper.api.nodes[role] == others, START_S, "the router sends it nothing more")
    assert len(answers) >= 6
    assert all(answer["choices"][0]["token_ids"] == expected for answer in answers)
    assert leaver.wait(START_S) == 0
    assert leaver.err == ""


def test_a_node_with_other_settings_is_refused_by_name(paper: Fleet) -> None:
    other = {"name": "hack-paper", "settings": {"page_tokens": 32, "send_sums": True}}
    stranger = paper.node("decode", "decode-odd", codec=other)
    assert stranger.wait(START_S) == 1
    assert (
        "node decode-odd does not fit the fleet: codec.page_tokens: '64' in the fleet, '32' at the node" in stranger.err
    )
    assert len(stranger.err.strip().splitlines()) == 1
    assert "decode-odd" not in httpx.get(f"{paper.api.url}/version", timeout=START_S).json()["nodes"]
    until(lambda: paper.api.nodes == {"prefill": 1, "decode": 2}, START_S, "the others are there")


@pytest.mark.slow
def test_nodes_listed_in_the_configuration_need_not_register(paper: Fleet, checkpoint: Path, tmp_path: Path) -> None:
    """A second router, with which no node has registered, uses the same nodes."""
    nodes = {
        "prefill": [paper.prefill.ready()["address"]],
        "decode": [child.ready()["address"] for child in paper.decode],
    }
    ports = {"listen": {"port": 0}, "control": {"port": 0}}
    router = role(tmp_path, "router", "second", {**ports, "model": str(checkpoint), "nodes": nodes})
    paper.children.append(router)
    url = router.ready()["http"]
    wanted = {"prefill": 1, "decode": 2}
    until(
        lambda: httpx.get(f"{url}/ready", timeout=START_S, verify=NO_TLS).json()["nodes"] == wanted,
        START_S,
        "the router has found its nodes",
    )
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=START_S)
    assert response.json()["usage"]["completion_tokens"] == 4
