"""The playground's chat tab in a real browser, with real processes behind it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from hackkv.model.tiny import Tiny, write_tiny
from tests.e2e.processes import Child, Fleet, role
from tests.page.conftest import Open, endless

PHONE = {"width": 390, "height": 844}
STOP_EARLY = """() => new MutationObserver((_, observer) => {
  if (!(document.querySelector(".turn.assistant:last-child .said")?.childNodes.length > 3)) return;
  observer.disconnect();
  document.getElementById("chat-stop").click();
}).observe(document.getElementById("chat-log"), { childList: true, subtree: true })"""

pytestmark = [pytest.mark.usefixtures("browser"), pytest.mark.slow]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a chat template."""
    return write_tiny(tmp_path_factory.mktemp("chat") / "tiny", Tiny(head_dim=64, max_context=8192))


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, browser: object
) -> Iterator[Fleet]:
    """A prefill node, a decode node and a router of one or two processes."""
    router = {"workers": request.param}
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), checkpoint, {"name": "hack"}, router, num_decode=1)
    yield fleet
    fleet.stop()


def chat(page: Page) -> Page:
    """Wait for a ready cluster and choose the tab by keyboard."""
    expect(page.locator("#state.ok")).to_have_text("ready")
    page.locator("#complete-tab").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#chat-tab")).to_be_focused()
    expect(page.get_by_role("tab", name="Chat")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#complete-panel")).to_be_hidden()
    return page


def say(page: Page, text: str, tokens: int) -> None:
    """Send a message by keyboard."""
    page.fill("#chat-tokens", str(tokens))
    page.locator("#chat-message").press_sequentially(text)
    page.keyboard.press("Enter")


def test_turns_are_sent_whole_and_shown_as_text(fleet: Fleet, open_page: Open) -> None:
    page = chat(open_page(fleet.api.url))
    sent: list[list[dict[str, str]]] = []

    def note(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or "")["messages"])
        route.continue_()

    page.route("**/v1/chat/completions", note)
    said = page.locator(".turn.assistant .said")
    for turn, text in enumerate(("hello <b>there</b>", "<img src=x onerror=alert(1)>")):
        say(page, text, 12)
        expect(page.locator("#chat-status")).to_contain_text("out in")
        expect(page.locator(".turn")).to_have_count(2 * turn + 2)
        expect(page.locator(".turn.user .said").nth(turn)).to_have_text(text)
        expect(page.locator("#chat-message")).to_have_value("")
        expect(page.locator("#chat-log")).to_have_attribute("aria-busy", "false")
        page.locator("#chat-message").focus()
    assert page.locator(".turns b, .turns img").count() == 0
    first, second = sent
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[0] == first[0] == {"role": "user", "content": "hello <b>there</b>"}
    assert second[1]["content"] == said.nth(0).evaluate("node => node.textContent") != ""

    page.click("#chat-clear")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#chat-log")).to_contain_text("The conversation stands here")
    expect(page.locator("#chat-message")).to_be_focused()
    say(page, "anew", 2)
    expect(page.locator("#chat-status")).to_contain_text("out in")
    assert [message["content"] for message in sent[-1]] == ["anew"]


def test_a_turn_says_what_was_known_from_earlier_ones(fleet: Fleet, open_page: Open) -> None:
    page = chat(open_page(fleet.api.url))
    for turn in range(2):
        say(page, "tell me more of it " * 20, 12)
        expect(page.locator("#chat-status")).to_contain_text("out in")
        expect(page.locator(".turn")).to_have_count(2 * turn + 2)
        expect(page.locator("#chat-log")).to_have_attribute("aria-busy", "false")
    expect(page.locator("#chat-status")).to_have_text(re.compile(r"tokens in \([1-9]\d* known from earlier turns\)"))


def test_stop_keeps_what_was_said_and_an_error_gives_the_message_back(fleet: Fleet, open_page: Open) -> None:
    page = chat(open_page(fleet.api.url, may_complain=True))  # a browser notes a refused request as an error
    page.route("**/v1/chat/completions", endless)
    page.evaluate(STOP_EARLY)
    say(page, "go on", 8000)
    expect(page.locator("#chat-status")).to_have_text("Stopped.")
    page.unroute("**/v1/chat/completions")
    expect(page.locator(".turn.assistant .said")).not_to_be_empty()
    expect(page.locator("#chat-send")).to_be_enabled()
    say(page, "more", 9000)
    expect(page.locator("#chat-status.wrong")).to_contain_text("serves at most 8192")
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator("#chat-message")).to_have_value("more")
    page.context.set_offline(True)
    page.fill("#chat-tokens", "4")
    page.click("#chat-send")
    expect(page.locator("#chat-status.wrong")).to_contain_text("It did not work")
    page.context.set_offline(False)
    page.click("#chat-send")
    expect(page.locator("#chat-status")).to_contain_text("out in")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{"width": 1280, "height": 900}, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_wrong(fleet: Fleet, open_page: Open, scheme: str, size: dict[str, int]) -> None:
    page = chat(open_page(fleet.api.url, color_scheme=scheme, viewport=size))
    say(page, "hi", 4)
    expect(page.locator("#chat-status")).to_contain_text("out in")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"]


@pytest.fixture
def speechless(tmp_path: Path, checkpoint: Path) -> Iterator[Child]:
    """A router, without nodes, whose model has no chat template."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    child = role(tmp_path, "router", "router", {"listen": {"port": 0}, "control": {"port": 0}, "model": str(folder)})
    yield child
    child.kill()


def test_a_model_without_a_template_says_so(speechless: Child, open_page: Open) -> None:
    page = open_page(speechless.ready()["http"])
    page.click("#chat-tab")
    expect(page.locator("#chat-none")).to_contain_text("no chat template")
    expect(page.locator("#chat")).to_be_hidden()
    assert Axe().run(page).violations_count == 0
