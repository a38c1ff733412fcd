"""The official `openai` client against `hackkv serve` with an API key, and the bytes of a prompt's KV."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import AuthenticationError, BadRequestError, OpenAI

from tests.e2e.conftest import Start
from tests.e2e.processes import START_S, Api, Child, alive, check_weight, family, until

API_KEY = "sk-loopback"
PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["alone", "2 workers"])
def served(
    request: pytest.FixtureRequest, checkpoint: Path, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> Child:
    """`hackkv serve` with two API keys, one prefill and one decode process, and a router of one or several."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"another\n{API_KEY}\n")
    small = ("--prefill", "1", "--decode", "1", "--port", "0", "--router-workers", str(request.param))
    flags = ("--api-key-file", str(keys), "--served-model-name", "tiny", "--dtype", "float32")
    return start("serve", str(checkpoint), *small, *flags)


@pytest.fixture(scope="module")
def api(served: Child) -> Api:
    """The HTTP side of `served`, with a key."""
    return Api(served.serving(), {"Authorization": f"Bearer {API_KEY}"})


@pytest.fixture
def client(api: Api) -> Iterator[OpenAI]:
    """A client that holds the key."""
    with OpenAI(api_key=API_KEY, base_url=f"{api.url}/v1", max_retries=0) as client:
        yield client


def test_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (6, "length")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == 6
    for text, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[text] == logprob == max(top.values())


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_stream_equals_the_whole_and_ends_with_usage(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert len(chunks) > 2


def test_n_choices_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    def draw() -> list[str]:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, temperature=1, n=2, seed=7)
        return [choice.text for choice in answer.choices]

    first = draw()
    assert first == draw()
    assert len(set(first)) == 2


def test_stop_cuts_the_text(client: OpenAI) -> None:
    full = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text
    stop = full[len(full) // 2 : len(full) // 2 + 2]
    cut = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (full[: full.index(stop)], "stop")


def test_refusals_are_the_clients_own_exceptions(api: Api, client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=PROMPT, suffix="no")
    assert refused.value.param == "suffix"
    with (
        OpenAI(api_key="wrong", base_url=f"{api.url}/v1", max_retries=0) as stranger,
        pytest.raises(AuthenticationError),
    ):
        stranger.models.list()


def test_the_key_guards_everything_but_the_probes(api: Api) -> None:
    status = {
        path: httpx.get(api.url + path, timeout=START_S).status_code
        for path in ("/live", "/ready", "/health", "/metrics")
    }
    assert status == {"/live": 200, "/ready": 200, "/health": 200, "/metrics": 401}
    assert httpx.post(f"{api.url}/v1/completions", json={"prompt": "x"}, timeout=START_S).status_code == 401


def test_a_long_prompt_weighs_about_a_quarter_of_fp16(api: Api) -> None:
    check_weight(api, most=0.267)  # 4-bit codes, two scales a row, headers


def test_ctrl_c_ends_every_process_in_the_middle_of_a_stream(
    request: pytest.FixtureRequest, served: Child, api: Api
) -> None:
    """This must be the last test here: it ends the cluster."""
    workers = request.node.callspec.params["served"]
    router = 2 * workers + (workers > 1)
    processes = family(served)
    assert len(processes) == 4 + router, (
        "the command, the fork server, two nodes, those that serve, parsers and a leader"
    )
    body = {"prompt": "def ", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{api.url}/v1/completions", json=body, headers=api.headers, timeout=START_S) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGINT)
        until(lambda: not alive(processes), START_S, "every process has ended")
        assert sum(map(bool, lines)) < 4000, "the answer was waited for"
    assert served.wait(START_S) == 130
