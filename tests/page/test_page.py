"""The router's page in a real browser, with real processes behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from hackkv.model.tiny import Tiny, write_tiny
from tests.e2e.processes import START_S, Child, Fleet, role
from tests.page.conftest import Open, endless

PHONE = {"width": 390, "height": 844}
NARROWEST = {"width": 320, "height": 640}
DESK = {"width": 1280, "height": 900}
CHUNKS = "document.querySelectorAll('#answer > span')[1]?.childNodes.length"
"""The number of pieces of text in the answer. Each event of the stream brings one."""
WATCH_STREAM = f"""() => {{
  window.seen = new Set();
  const note = () => document.getElementById("stop").disabled || window.seen.add({CHUNKS});
  new MutationObserver(note).observe(document.getElementById("answer"), {{ childList: true, subtree: true }});
}}"""
"""Records the lengths of the answer while Stop can be pressed. The script runs in the page, since a call through the
driver takes longer than many answers."""
STOP_EARLY = f"""() => {{
  const note = () => {CHUNKS} > 3 && document.getElementById("stop").click();
  new MutationObserver(note).observe(document.getElementById("answer"), {{ childList: true, subtree: true }});
}}"""
CANVAS_COLOURS = """() => {
  const canvas = document.querySelector("#jct-plot canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4) colours.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
  return [...colours];
}"""
LAYOUT_SHIFT = """() => new Promise((done) => new PerformanceObserver(
  (list) => done(list.getEntries().reduce((sum, entry) => sum + entry.value, 0)),
).observe({ type: "layout-shift", buffered: true }))"""

pytestmark = [pytest.mark.usefixtures("browser"), pytest.mark.slow]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return write_tiny(tmp_path_factory.mktemp("page") / "tiny", Tiny(head_dim=64, max_context=8192))


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, browser: object
) -> Iterator[Fleet]:
    """A prefill node, a decode node and a router of one or two processes."""
    router = {"trace_link": "https://traces.example/{trace_id}", "workers": request.param}
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), checkpoint, {"name": "hack"}, router, num_decode=1)
    yield fleet
    fleet.stop()


def ready(page: Page) -> Page:
    """Wait until the page shows a ready cluster."""
    expect(page.locator("#state.ok")).to_have_text("ready")
    return page


def served(fleet: Fleet, count: int = 3) -> None:
    """Send a few requests."""
    for index in range(count):
        fleet.api.complete(list(range(5, 105)), max_tokens=8 + index)


def test_an_idle_cluster_says_what_to_do(fleet: Fleet, open_page: Open) -> None:
    """This must be the first test: there are no requests yet."""
    page = ready(open_page(fleet.api.url))
    expect(page.locator("#requests-empty")).to_contain_text("No requests yet")
    expect(page.locator("#curl")).to_contain_text(f"curl -N {fleet.api.url}/v1/completions")
    expect(page.locator("#nodes > li")).to_have_count(2)
    expect(page.locator("#now-jct")).to_have_text("–")


def test_a_completion_typed_into_the_playground_streams(fleet: Fleet, open_page: Open) -> None:
    page = ready(open_page(fleet.api.url))
    page.fill("#prompt", "")
    page.locator("#prompt").press_sequentially("the <b>quick</b> fox")
    page.fill("#max-tokens", "400")
    page.evaluate(WATCH_STREAM)
    page.locator("#prompt").press("Control+Enter")
    answer = page.locator("#answer")
    status = page.locator("#playground-status")
    expect(status).to_contain_text("out in")
    told = re.search(r"(\d+) out in", status.inner_text())
    assert told is not None
    assert page.evaluate(CHUNKS) == int(told[1]) > 20
    assert page.evaluate("window.seen.size") > 3  # text was there, and grew, while Stop could be pressed
    expect(answer).to_contain_text("the <b>quick</b> fox")
    expect(page.locator("#run")).to_be_enabled()
    expect(page.locator("#playground-bar .bar")).to_be_visible()


def test_prompts_that_were_there_already_are_shown(fleet: Fleet, open_page: Open) -> None:
    """Prompts are repeated. Only their last tokens are computed and sent."""
    served(fleet, 2)
    page = ready(open_page(fleet.api.url))
    expect(page.locator("#found")).to_contain_text(re.compile(r"not computed[1-9].*not sent[1-9]"))
    expect(page.locator("#found-note")).to_contain_text("prompt tokens since the router started")
    for node in ("prefill-0", "decode-0"):
        kept = page.locator("#nodes > li", has_text=node).locator(".kept")
        expect(kept).to_have_text(
            re.compile(r"^[1-9]\d* pages? kept.*; [1-9][\d.]*\s% of what prompts asked for was here")
        )


def test_stop_stops_and_an_error_is_shown(fleet: Fleet, open_page: Open) -> None:
    page = ready(open_page(fleet.api.url, may_complain=True))  # a browser notes a refused request as an error
    page.fill("#prompt", "hello world")
    page.fill("#max-tokens", "8000")
    page.evaluate(STOP_EARLY)
    page.route("**/v1/completions", endless)
    page.click("#run")
    expect(page.locator("#playground-status")).to_have_text("Stopped.")
    page.unroute("**/v1/completions")
    page.fill("#max-tokens", "9000")
    page.click("#run")
    expect(page.locator("#playground-status.wrong")).to_contain_text("serves at most 8192")
    expect(page.locator("#requests-rows tr.wrong").first).to_contain_text("cancelled")


def test_the_waterfall_sums_to_the_total(fleet: Fleet, open_page: Open) -> None:
    served(fleet)
    page = ready(open_page(fleet.api.url))
    told = httpx.get(f"{fleet.api.url}/api/requests", timeout=START_S).json()["ended"][::-1]
    rows = page.locator("#requests-rows > tr")
    expect(rows).to_have_count(min(12, len(told)))
    longest = max(one["total_s"] for one in told[:12])
    shares = []
    for index, one in enumerate(told[:3]):
        parts = rows.nth(index).locator(".bar > span[data-stage]")
        spent = parts.evaluate_all("parts => parts.map(part => Number(part.dataset.seconds))")
        assert sum(spent) == pytest.approx(one["total_s"])
        wide = parts.evaluate_all("parts => parts.map(part => part.getBoundingClientRect().width)")
        track = rows.nth(index).locator(".bar").bounding_box()
        assert track is not None
        shares.append(sum(wide) / track["width"] / one["total_s"])
        assert sum(wide) <= track["width"] + 1
    assert shares == pytest.approx([shares[0]] * 3, rel=0.02)  # one scale for all rows
    assert 1 <= 1 / shares[0] / longest <= 2.6  # and the longest row fills it to the next round number

    rows.nth(0).locator("button").click()
    table = page.locator(".detail table.stages")
    assert parse(table.locator("tr.total td").nth(2).inner_text()) == pytest.approx(told[0]["total_s"], rel=0.01)
    stages = [parse(text) for text in table.locator("tbody tr:not(.total) td:nth-child(3)").all_inner_texts()]
    assert sum(stages) == pytest.approx(told[0]["total_s"], rel=0.03)
    expect(page.locator(".detail table.facts").first).to_contain_text("prefill-0 → decode-0")


def test_a_request_links_to_its_trace(fleet: Fleet, open_page: Open) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    body = {"prompt": list(range(5, 25)), "max_tokens": 2}
    httpx.post(f"{fleet.api.url}/v1/completions", json=body, headers=headers, timeout=START_S).raise_for_status()
    page = ready(open_page(fleet.api.url))
    page.locator("#requests-rows > tr").nth(0).locator("button").click()
    link = page.get_by_role("link", name=trace_id)
    expect(link).to_have_attribute("href", f"https://traces.example/{trace_id}")


def parse(text: str) -> float:
    """Seconds of '12.3 ms' or '1.20 s'."""
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


def test_figures_charts_and_bytes_show_what_was_served(fleet: Fleet, open_page: Open) -> None:
    page = ready(open_page(fleet.api.url))
    served(fleet)
    expect(page.locator("#now-finished")).not_to_have_text("0")
    expect(page.locator("#now-ratio")).to_contain_text("%")
    expect(page.locator("#jct-legend tr.total td").nth(1)).to_have_text(re.compile(r"\d m?s"))
    expect(page.locator("#jct-plot .none")).to_be_hidden()
    painted = page.evaluate(CANVAS_COLOURS)
    assert "35,144,91" in painted or "47,111,196" in painted  # decode or prefill, in the light palette


def test_everything_can_be_reached_by_keyboard(fleet: Fleet, open_page: Open) -> None:
    served(fleet)
    page = ready(open_page(fleet.api.url))
    expect(page.locator("#requests-rows .opener").first).to_be_visible()
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "document.activeElement.id || document.activeElement.className || document.activeElement.href"
        )
        if name is None or (name in reached and name != "opener"):
            break  # past the last one
        reached.append(name)
    wanted = ["skip", "theme-button", "prompt", "max-tokens", "temperature", "run", "answer", "hold", "opener"]
    assert [name for name in dict.fromkeys(reached) if name in wanted] == wanted
    assert reached[-1].endswith("/v1/models")

    page.locator("#requests-rows .opener").nth(1).focus()
    page.keyboard.press("Enter")
    opener = page.locator("#requests-rows .opener").nth(1)
    expect(opener).to_have_attribute("aria-expanded", "true")
    expect(opener).to_be_focused()
    expect(page.locator(".detail")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator(".detail")).to_have_count(0)
    expect(opener).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_wrong_in_either_scheme(
    fleet: Fleet, open_page: Open, scheme: str, size: dict[str, int]
) -> None:
    served(fleet)
    page = ready(open_page(fleet.api.url, color_scheme=scheme, viewport=size))
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.locator("#requests-rows .opener").first.click()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_colours_follow_the_button_and_are_remembered(fleet: Fleet, open_page: Open) -> None:
    page = ready(open_page(fleet.api.url, color_scheme="light"))
    button = page.locator("#theme-button")
    button.click()
    button.click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(button).to_have_accessible_name("Colours: dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    button.click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


@pytest.mark.parametrize("size", [PHONE, NARROWEST], ids=["phone", "narrowest"])
def test_a_small_screen_needs_no_sideways_scrolling(fleet: Fleet, open_page: Open, size: dict[str, int]) -> None:
    served(fleet)
    page = open_page(fleet.api.url, viewport=size)
    page.route("**/api/requests?*", with_the_longest_cancelled)
    page.reload()
    outcome = ready(page).locator("#requests-rows .outcome")
    expect(outcome).to_have_text("cancelled")
    box = outcome.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= size["width"]
    assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
    page.locator("#requests-rows .opener").first.click()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"]


def with_the_longest_cancelled(route: Route) -> None:
    """Change the answer: the last request was cancelled after 100 s, the longest time on the scale of the timeline."""
    response = route.fetch()
    told = response.json()
    if told["ended"]:
        last = told["ended"][-1]
        times = 100 / last["total_s"]
        last |= {"outcome": "cancelled", "total_s": 100}
        last["stages"] = {stage: times * spent for stage, spent in last["stages"].items()}
    route.fulfill(response=response, json=told)


def test_nothing_jumps_while_requests_come_in(fleet: Fleet, open_page: Open) -> None:
    page = ready(open_page(fleet.api.url))
    served(fleet, 12)
    expect(page.locator("#requests-rows > tr")).to_have_count(12)
    page.wait_for_timeout(2500)  # two more updates of the page
    page.evaluate("document.body.style.paddingTop = '1px'")  # one shift on purpose, so that there is one to report
    assert page.evaluate(LAYOUT_SHIFT) < 0.05


def test_a_node_that_dies_is_shown_and_so_is_its_successor(fleet: Fleet, open_page: Open) -> None:
    page = ready(open_page(fleet.api.url))
    fleet.decode[0].kill()
    lost = page.locator("#nodes > li", has_text="decode-0")
    expect(lost).to_contain_text("decode, lost")
    expect(page.locator("#state.bad")).to_have_text("not ready: no decode node")
    fleet.decode.append(fleet.node("decode", "decode-1"))
    fleet.decode[-1].ready()
    ready(page)
    expect(page.locator("#nodes > li")).to_have_count(3)


def test_a_router_that_does_not_answer_is_an_alarm_until_it_does(fleet: Fleet, open_page: Open) -> None:
    page = ready(open_page(fleet.api.url, may_complain=True))
    page.context.set_offline(True)
    banner = page.locator("#banner")
    expect(banner).to_contain_text("does not answer")
    expect(page.locator("#state.bad")).to_have_text("no answer")
    page.context.set_offline(False)
    expect(banner).to_be_hidden()
    ready(page)


@pytest.fixture
def locked(tmp_path: Path, checkpoint: Path) -> Iterator[Child]:
    """A router that asks for a key and has no nodes."""
    ports = {"listen": {"port": 0}, "control": {"port": 0}}
    child = role(tmp_path, "router", "router", {**ports, "model": str(checkpoint), "api_keys": ["sesame"]})
    yield child
    child.kill()


def test_a_key_is_asked_for_and_missing_nodes_are_named(locked: Child, open_page: Open) -> None:
    page = open_page(locked.ready()["http"], may_complain=True)  # a browser notes a 401 as an error
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#banner")).to_contain_text("does not accept this API key")
    page.click("#key-button")
    page.fill("#key", "sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#state.bad")).to_have_text("not ready: no prefill and no decode node")
    expect(page.locator("#nodes")).to_contain_text("no decode node")
    expect(page.locator("#banner")).to_be_hidden()
    assert Axe().run(page).violations_count == 0
