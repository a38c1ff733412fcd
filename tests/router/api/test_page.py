"""The page's files and the JSON behind it, over a scripted cluster."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

import router.api
from tests.router.conftest import Api, check_error
from tests.router.processes import PATIENCE_S

FILES = {path.name: path.read_bytes() for path in Path(router.api.__file__).with_name("web").iterdir()}
COMPLETIONS = "/v1/completions"
VENDORED = {
    "uplot-1.6.32.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""Files of the npm package uplot 1.6.32: dist/uPlot.iife.min.js and dist/uPlot.min.css."""


async def requests(api: Api, after: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = (await api.http.get("/api/requests", params={"after": after})).json()
    return told


async def test_every_file_of_the_page_is_served_and_names_no_other_origin(api: Api) -> None:
    page = await api.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="/page/([^"]+)"', page.text)
    for name, content in FILES.items():
        answer = await api.http.get(f"/page/{name}")
        assert answer.content == content
        assert answer.headers["x-content-type-options"] == "nosniff"
        if name not in VENDORED:
            named += re.findall(r'from "\./([^"]+)"', answer.text)
            assert not re.search(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)\w+\.", answer.text), name
    assert FILES.keys() == {*named, "index.html"}


@pytest.mark.parametrize("name", VENDORED)
def test_vendored_files_are_what_was_published(name: str) -> None:
    assert hashlib.sha256(FILES[name]).hexdigest() == VENDORED[name]


@pytest.mark.parametrize("name", ["..%2fapp.py", "nothing.js", "%2e%2e/app.py", "index.html/x"])
async def test_nothing_else_is_served(api: Api, name: str) -> None:
    check_error(await api.http.get(f"/page/{name}"), 404)


@pytest.mark.parametrize("settings", [{"api_keys": ["sesame"]}])
async def test_the_page_is_open_and_what_it_shows_is_not(api: Api) -> None:
    assert (await api.http.get("/")).status_code == (await api.http.get("/page/app.js")).status_code == 200
    for path in ("/api/cluster", "/api/requests"):
        check_error(await api.http.get(path), 401)
        assert (await api.http.get(path, headers={"Authorization": "Bearer sesame"})).status_code == 200


@pytest.mark.parametrize("path", ["/api/cluster", "/api/requests"])
@pytest.mark.parametrize("after", ["-1", "x", "", "1.5", "٣", "9" * 99])
async def test_a_bad_number_is_refused_by_name(api: Api, path: str, after: str) -> None:
    assert check_error(await api.http.get(path, params={"after": after}), 400)["param"] == "after"


async def test_a_finished_request_is_told_without_its_text(api: Api) -> None:
    body = {"prompt": "the secret fox", "max_tokens": 5}
    before = max((one["seq"] for one in (await requests(api))["ended"]), default=0)
    answer = (await api.http.post(COMPLETIONS, json=body)).json()
    async with asyncio.timeout(PATIENCE_S):
        while not (told := await requests(api, before))["ended"]:
            pass  # the process that is asked may not be the one that answered
    [one] = told["ended"]
    assert told["live"] == []
    assert one["id"].startswith(answer["id"])
    assert (one["outcome"], one["output_tokens"], one["max_tokens"]) == ("length", 5, 5)
    assert one["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert sum(one["stages"].values()) == pytest.approx(one["total_s"])
    assert one["ttft_s"] + 4 * one["tpot_s"] <= one["total_s"]
    assert (one["prefill_node"], one["decode_node"], one["attempts"]) == ("p0", "d0", 1)
    assert one["kv"]["ratio"] == pytest.approx((5 * one["prompt_tokens"] + 7) / (32 * one["prompt_tokens"]))
    assert "secret" not in str(told)
    assert "choices" not in str(told)
    assert (await requests(api, after=one["seq"]))["ended"] == []
