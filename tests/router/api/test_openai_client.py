"""The official client, with a router of one process and with a router of two."""

from __future__ import annotations

import openai
import pytest

from tests.router.conftest import ALSO_OUTSIDE, Api
from tests.router.scripted import Point

pytestmark = ALSO_OUTSIDE


async def test_completions(api: Api) -> None:
    answer = await api.openai.completions.create(model="tiny", prompt="the fox", max_tokens=4, logprobs=2, seed=1, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


async def test_streamed_completions(api: Api) -> None:
    whole = await api.openai.completions.create(model="tiny", prompt="the fox", max_tokens=9, seed=4)
    text = ""
    async for chunk in await api.openai.completions.create(
        model="tiny", prompt="the fox", max_tokens=9, seed=4, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.text for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert chunk.usage == whole.usage


async def test_chat(api: Api) -> None:
    answer = await api.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=3,
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 5
    entry = choice.logprobs.content[0]
    assert bytes(entry.bytes or []).decode() == entry.token
    assert len(entry.top_logprobs) == 3


async def test_streamed_chat(api: Api) -> None:
    stream = await api.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, n=2, stream=True, seed=2,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    roles = [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert (roles, reasons) == (["assistant"] * 2, ["length"] * 2)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


async def test_models(api: Api) -> None:
    assert [model.id async for model in await api.openai.models.list()] == ["tiny"]
    assert (await api.openai.models.retrieve("tiny")).owned_by == "hackkv"


async def test_errors_are_the_clients_own_classes(api: Api) -> None:
    with pytest.raises(openai.NotFoundError):
        await api.openai.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        await api.openai.completions.create(model="tiny", prompt="x", suffix="y")
    assert caught.value.param == "suffix"
    api.cluster.overload("p0", "p1")
    with pytest.raises(openai.RateLimitError):
        await api.openai.completions.create(model="tiny", prompt="x")


async def test_an_error_in_the_middle_of_a_stream_is_raised(api: Api) -> None:
    for node_id in ("d0", "d1"):
        api.cluster.fail(node_id, Point.TOKEN)
    stream = await api.openai.completions.create(model="tiny", prompt="x", max_tokens=5, stream=True)
    texts = [(await anext(stream)).choices[0].text for _ in range(2)]
    assert all(texts)
    with pytest.raises(openai.APIError, match="died"):
        await anext(stream)
