"""The page in a real browser, against a real server with a tiny model."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.chat import chat_tokenizer
from helpers.engine import converted

import fastweights as fw

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("playwright.sync_api", reason="needs Playwright")
from playwright.sync_api import Browser, Request, Route, expect, sync_playwright

from fastweights.serve.address import address_of, bind
from fastweights.serve.app import make_app
from fastweights.serve.auth import Keys
from fastweights.serve.server import Server, run
from fastweights.serve.service import Service, Settings
from fastweights.serve.store import StoreLimits, open_store
from fastweights.serve.worker import Worker

CHROMIUM = Path("/usr/bin/chromium")
OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# Greedy, so that texts are the same each time, and answers end only at this length.
SETTINGS = {"temperature": 0, "maxTokens": 8}
# A tiny model is too fast to watch, so each token takes at least STEP seconds. An answer of LONG tokens takes longer
# than any timeout of a test: on a busy machine, too, it is still being written when the test acts on it.
LONG, STEP = 50_000, 0.003
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium at {CHROMIUM}")
expect.set_options(timeout=15_000)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with a tiny model."""
    model, tokenizer = converted(), chat_tokenizer()
    model.lm_head.weight.data[tokenizer.all_special_ids] = 0  # never the likeliest token
    engine = fw.Engine(model, batch_size=2, tokenizer=tokenizer)
    choose = engine.sampler.choose
    engine.sampler.choose = lambda *given, **options: (time.sleep(STEP), choose(*given, **options))[1]
    worker = Worker(engine, queue_limit=8)
    store = open_store(None, engine.model, StoreLimits())
    app = make_app(Service(engine, worker, store, Settings("tiny", max_tokens=LONG)), Keys([]))
    with bind("127.0.0.1", 0) as bound:
        running = Server(app, worker, grace=0, on_ready=lambda: None)
        thread = threading.Thread(target=run, args=(running, bound))
        thread.start()
        yield address_of(bound)
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield chromium
        chromium.close()


class Chat:
    """The page as a user sees it, and what it sends."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.url = url
        self.sent: list[dict[str, Any]] = []  # bodies of the requests for answers
        self.problems: list[str] = []  # that only a developer sees
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self._console(message.text))
        self.page.on("request", self._request)
        self.page.goto(url)

    def fresh(self) -> None:
        """Forget everything: far faster than a new browser window."""
        self.page.unroute_all()
        self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.page.evaluate("kept => { localStorage['fastweights:settings'] = kept }", json.dumps(SETTINGS))
        self.sent.clear()
        self.open()

    def open(self) -> None:
        self.page.goto(self.url)
        expect(self.page.locator("#model")).not_to_be_empty()

    def _console(self, text: str) -> None:
        if "Content Security Policy" in text:
            self.problems.append(text)

    def _request(self, request: Request) -> None:
        if request.url.endswith("/v1/responses") and request.method == "POST":
            self.sent.append(request.post_data_json)

    def set(self, **values: Any) -> None:
        """Settings, by the ids of their fields."""
        self.page.click("#open-settings")
        for id, value in values.items():
            self.page.fill(f"#{id.replace('_', '-')}", str(value))
        self.page.click("#settings button[value=save]")

    def start(self, text: str) -> None:
        """Send a message; the answer is not waited for."""
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")

    def say(self, text: str) -> str:
        """Send a message and wait for the answer."""
        self.start(text)
        self.wait()
        return self.answers()[-1]

    def wait(self) -> None:
        expect(self.page.locator(".turn.writing")).to_have_count(0)

    def messages(self) -> list[str]:
        return self.page.locator(".message.user .text").all_inner_texts()

    def answers(self) -> list[str]:
        return [text or "" for text in self.page.locator(".answer .text").all_text_contents()]

    def act(self, name: str, turn: int) -> None:
        """Press a button of a turn."""
        self.page.locator(".turn").nth(turn).locator(f"[data-do={name}]").click()

    def turns(self) -> list[dict[str, Any]]:
        """Turns of the stored conversations, in their order."""
        kept = self.page.evaluate("Object.entries(localStorage)")
        found = [json.loads(value) for key, value in kept if key.startswith("fastweights:conversation:")]
        return sorted((turn for one in found for turn in one["turns"].values()), key=lambda turn: turn["at"])


@pytest.fixture(scope="module")
def window(browser: Browser, server: str) -> Iterator[Chat]:
    opened = Chat(browser, server)
    yield opened
    opened.context.close()


@pytest.fixture
def chat(window: Chat) -> Iterator[Chat]:
    window.fresh()
    yield window
    for other in window.context.pages[1:]:
        other.close()
    problems, window.problems = window.problems, []
    assert problems == []


def events(*deltas: str) -> str:
    """A whole stream."""
    made = [dict(type="response.output_text.delta", delta=delta) for delta in deltas]
    made.append(dict(type="response.completed", response=dict(id="resp_1", usage=dict(total_tokens=9))))
    return "".join(f"data: {json.dumps(event)}\n\n" for event in made)


def reply(chat: Chat, status: int, error: str = "", headers: dict[str, str] | None = None) -> None:
    """Make the next request for an answer fail."""

    def fail(route: Route) -> None:
        body = json.dumps({"error": {"message": error}})
        route.fulfill(status=status, body=body, content_type="application/json", headers=headers or {})

    chat.page.route("**/v1/responses", fail, times=1)


# Chat


def test_an_answer_appears_while_it_is_written(chat: Chat) -> None:
    chat.set(max_tokens=LONG)
    chat.start("Hello")
    expect(chat.page.locator(".turn.writing .answer .text")).not_to_be_empty()
    expect(chat.page.get_by_role("button", name="Stop")).to_be_visible()
    early = chat.answers()[0]
    expect(chat.page.locator(".turn.writing .answer .text")).not_to_have_text(early)
    later = chat.answers()[0]
    assert later.startswith(early) and len(early) < len(later) < LONG
    assert chat.messages() == ["Hello"]
    chat.page.keyboard.press("Escape")
    chat.wait()
    chat.set(max_tokens=5)
    assert len(chat.say("Hello again")) == 5
    expect(chat.page.get_by_role("button", name="Send")).to_be_visible()


def test_enter_sends_and_shift_enter_begins_a_line(chat: Chat) -> None:
    chat.page.get_by_label("Message", exact=True).type("one")
    chat.page.keyboard.press("Shift+Enter")
    chat.page.keyboard.type("two")
    chat.page.keyboard.press("Enter")
    chat.wait()
    assert chat.messages() == ["one\ntwo"]
    assert chat.page.input_value("#message") == ""


def test_settings_are_sent_and_survive_a_reload(chat: Chat) -> None:
    chat.set(temperature=0.25, top_p=0.5, max_tokens=3, system="Be brief.")
    chat.open()
    chat.say("Hi")
    sent = chat.sent[0]
    assert [sent[name] for name in ("temperature", "top_p", "max_output_tokens")] == [0.25, 0.5, 3]
    assert sent["instructions"] == "Be brief." and sent["store"] and "previous_response_id" not in sent
    chat.say("Again")
    assert "instructions" not in chat.sent[1]  # the state has read it
    expect(chat.page.locator(".turn .status").last).to_be_visible()  # says that the answer was cut


def test_the_next_message_only_names_the_last_answer(chat: Chat) -> None:
    for text in ("one", "two", "three"):
        chat.say(text)
    before = [turn["responseId"] for turn in chat.turns()]
    assert [sent["previous_response_id"] for sent in chat.sent[1:]] == before[:2]
    assert chat.sent[2]["input"] == [{"role": "user", "content": "three"}]


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stopped_answer_stays_and_is_continued(chat: Chat, how: str) -> None:
    chat.set(max_tokens=LONG)
    chat.start("Hello")
    expect(chat.page.locator(".turn.writing .answer .text")).not_to_be_empty()
    if how == "button":
        chat.page.click("#stop")
    else:
        chat.page.keyboard.press(how)
    chat.wait()
    [written] = chat.answers()
    expect(chat.page.locator(".turn .status")).to_have_text("Stopped.")
    assert written == chat.turns()[0]["answer"] and written
    expect(chat.page.locator("#message")).to_be_focused()
    chat.set(max_tokens=4)
    chat.say("Go on")
    roles = ("user", "Hello"), ("assistant", written), ("user", "Go on")
    assert chat.sent[1]["input"] == [{"role": role, "content": content} for role, content in roles]
    assert chat.answers()[0] == written


# Branches


def test_fork_continues_from_the_chosen_message_and_the_tree_switches(chat: Chat) -> None:
    answers = [chat.say(text) for text in ("one", "two")]
    chat.act("fork", 0)
    assert chat.messages() == ["one"]
    expect(chat.page.locator("#branch-hint")).to_be_visible()
    chat.say("three")
    assert chat.messages() == ["one", "three"]
    assert chat.sent[2]["previous_response_id"] == chat.turns()[0]["responseId"]
    branches = chat.page.locator("#branches button")
    assert branches.locator(".title").all_inner_texts() == ["one", "two", "three"]
    branches.nth(1).click()
    assert chat.messages() == ["one", "two"] and chat.answers() == answers
    expect(branches.nth(1)).to_have_attribute("aria-current", "true")


def test_edited_and_repeated_messages_are_branches(chat: Chat) -> None:
    chat.say("one")
    chat.say("two")
    chat.act("edit", 1)
    assert chat.page.input_value("#message") == "two"
    chat.say("other")
    chat.act("retry", 1)
    chat.wait()
    first = chat.turns()[0]["responseId"]
    assert [sent["previous_response_id"] for sent in chat.sent[1:]] == [first] * 3
    assert [sent["input"][0]["content"] for sent in chat.sent] == ["one", "two", "other", "other"]
    assert chat.page.locator("#branches button").count() == 4


def test_edit_does_not_lose_a_draft(chat: Chat) -> None:
    chat.say("one")
    chat.page.locator("#message").type("a draft")
    chat.act("edit", 0)
    assert chat.page.input_value("#message") == "one"
    chat.page.keyboard.press("Control+z")
    assert chat.page.input_value("#message") == "a draft"


# What is kept


def test_reload_and_go_on(chat: Chat) -> None:
    chat.say("Hello")
    before = chat.answers()
    chat.page.fill("#message", "not sent yet")
    chat.open()
    assert chat.messages() == ["Hello"] and chat.answers() == before
    assert chat.page.input_value("#message") == "not sent yet"
    chat.say("More")
    assert chat.sent[1]["previous_response_id"] == chat.turns()[0]["responseId"]


def test_reload_while_an_answer_is_written_keeps_its_text(chat: Chat) -> None:
    chat.set(max_tokens=LONG)
    chat.start("Hello")
    expect(chat.page.locator(".turn.writing .answer .text")).not_to_be_empty()
    chat.open()
    [kept] = chat.answers()
    assert 0 < len(kept) < LONG
    expect(chat.page.locator(".turn .status")).to_be_visible()  # says that it is not complete
    chat.set(max_tokens=4)
    chat.say("Go on")
    assert chat.sent[1]["input"][1] == {"role": "assistant", "content": kept}


def test_another_tab_follows(chat: Chat) -> None:
    other = chat.context.new_page()
    other.goto(chat.url)
    chat.say("Hello")
    other.locator("#conversations button.title").click()
    expect(other.locator(".message.user .text")).to_have_text("Hello")
    assert other.locator(".answer .text").text_content() == chat.answers()[0]


def test_saved_state_is_loaded_and_continued(chat: Chat, tmp_path: Path) -> None:
    chat.say("Hello")
    with chat.page.expect_download() as download:
        chat.act("save", 0)
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert file.name == "Hello.safetensors"

    with chat.page.expect_file_chooser() as chooser:
        chat.page.click("#load")
    chooser.value.set_files(file)
    expect(chat.page.locator(".turn.loaded")).to_contain_text(file.name)
    saved, loaded = chat.turns()
    # The file is of the place after the tokens that end an answer.
    assert saved["tokens"] <= loaded["tokens"] < saved["tokens"] + 5
    assert loaded["responseId"] != saved["responseId"]
    chat.say("More")
    assert chat.sent[1]["previous_response_id"] == loaded["responseId"]


def test_damaged_state_file_is_refused_in_words(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(b"nothing of use")
    chat.page.set_input_files("#state-file", file)
    expect(chat.page.get_by_role("alert")).to_contain_text("damaged.safetensors was not loaded")


def test_deleted_conversation_is_gone_here_and_on_the_server(chat: Chat) -> None:
    chat.say("Hello")
    id = chat.turns()[0]["responseId"]
    chat.page.get_by_role("button", name="Delete Hello").click()
    with chat.page.expect_response(re.compile(id)) as deleted:
        chat.page.click("#ask-delete button[value=save]")
    assert deleted.value.ok
    assert chat.turns() == [] and chat.messages() == []
    assert chat.context.request.get(f"{chat.url}/v1/responses/{id}").status == 404


def test_storage_of_something_else_does_no_harm(chat: Chat) -> None:
    for key, value in (("conversation:x", "{not JSON"), ("conversation:y", "null"), ("current", "[]")):
        chat.page.evaluate("([key, value]) => { localStorage[`fastweights:${key}`] = value }", [key, value])
    chat.open()
    assert chat.say("Hello")


# Memory and time


def test_meter_compares_the_state_with_a_kv_cache(chat: Chat) -> None:
    info = chat.context.request.get(f"{chat.url}/v1/info").json()
    state = chat.page.locator("#state-bytes").inner_text()
    held = []
    chat.set(max_tokens=100)
    for text in ("one", "two"):
        chat.say(text)
        tokens = chat.turns()[-1]["tokens"]
        expect(chat.page.locator("#token-count")).to_contain_text(f"{tokens:,}")
        shown = chat.page.locator("#cache-bytes").inner_text()
        held.append(_bytes(shown))
        assert held[-1] == pytest.approx(tokens * info["base_kv_bytes_per_token"], rel=0.01)
    assert held[1] > held[0]
    assert chat.page.locator("#state-bytes").inner_text() == state
    assert _bytes(state) == pytest.approx(info["state_bytes"], rel=0.01)
    assert len(chat.page.locator("#plot .times").get_attribute("points").split()) > 1


def _bytes(text: str) -> float:
    value, unit = text.split()
    return float(value) * 1000 ** ["B", "kB", "MB", "GB"].index(unit)


# Errors


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (429, {"Retry-After": "7"}, "busy. Try again in 7 seconds"),
        (503, {}, "shutting down"),
        (500, {}, "odd"),
        (None, {}, "cannot be reached"),
    ],
)
def test_error_is_shown_and_nothing_typed_is_lost(
    chat: Chat, status: int | None, headers: dict[str, str], words: str
) -> None:
    if status:
        reply(chat, status, "odd", headers)
    else:
        chat.page.route("**/v1/responses", lambda route: route.abort(), times=1)
    chat.say("Hello")
    expect(chat.page.locator(".turn.failed .status")).to_contain_text(words)
    chat.open()
    assert chat.messages() == ["Hello"]
    chat.page.get_by_role("button", name="Try again").click()
    chat.wait()
    assert chat.messages() == ["Hello"] and chat.answers()[0]
    assert chat.sent[0] == chat.sent[1]


def test_message_after_a_failed_one_continues_the_last_answer(chat: Chat) -> None:
    chat.say("one")
    reply(chat, 500)
    chat.say("two")
    chat.say("three")
    assert chat.messages() == ["one", "three"]
    assert chat.sent[2]["previous_response_id"] == chat.turns()[0]["responseId"]
    assert "two" in chat.page.locator("#branches").inner_text()


def test_connection_lost_in_an_answer_keeps_what_came(chat: Chat) -> None:
    begun = events("Once ", "upon").rpartition("data:")[0]  # without the end
    chat.page.route("**/v1/responses", lambda route: route.fulfill(body=begun, content_type="text/event-stream"))
    assert chat.say("Hello") == "Once upon"
    expect(chat.page.locator(".turn .status")).to_contain_text("connection ended")


def test_deleted_response_is_explained_and_its_text_is_read_again(chat: Chat) -> None:
    answer = chat.say("one")
    chat.context.request.delete(f"{chat.url}/v1/responses/{chat.turns()[0]['responseId']}")
    chat.say("two")
    expect(chat.page.locator(".turn.failed .status")).to_contain_text("deleted or has expired")
    chat.page.get_by_role("button", name="Read the text again").click()
    chat.wait()
    roles = ("user", "one"), ("assistant", answer), ("user", "two")
    assert chat.sent[2]["input"] == [{"role": role, "content": content} for role, content in roles]
    assert "previous_response_id" not in chat.sent[2]
    assert chat.answers()[1]


def test_key_is_asked_for_and_kept_only_for_the_tab(chat: Chat) -> None:
    seen = []

    def guard(route: Route) -> None:
        seen.append(route.request.headers.get("authorization"))
        if seen[-1] == "Bearer secret":
            route.fallback()
        else:
            route.fulfill(status=401, json={"error": {"message": "no key"}})

    chat.page.route("**/v1/responses", guard)
    chat.start("Hello")
    for key in ("wrong", "secret"):
        chat.page.fill("#asked-key", key)
        chat.page.keyboard.press("Enter")
        expect(chat.page.locator("#asked-key")).to_have_value("")
    chat.wait()
    assert seen == [None, "Bearer wrong", "Bearer secret"] and chat.answers()[0]
    assert "secret" not in json.dumps(chat.page.evaluate("({...localStorage})"))
    chat.open()
    chat.say("More")
    assert seen[-1] == "Bearer secret"
    other = chat.context.new_page()
    other.goto(chat.url)
    assert "secret" not in json.dumps(other.evaluate("({...sessionStorage})"))


def test_refusing_to_give_a_key_loses_nothing(chat: Chat) -> None:
    chat.page.route("**/v1/responses", lambda route: route.fulfill(status=401, json={"error": {}}))
    chat.start("Hello")
    expect(chat.page.locator("#ask-key")).to_be_visible()
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator(".turn.failed .status")).to_contain_text("needs an API key")
    assert chat.messages() == ["Hello"]


# Safety


def test_hostile_text_is_shown_and_not_run(chat: Chat) -> None:
    hostile = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
    info = dict(model=hostile, state_bytes=9, base_kv_bytes_per_token=1, max_length=None, chat_template=True, slots=1)
    chat.page.route("**/v1/info", lambda route: route.fulfill(json=info))
    chat.page.route(
        "**/v1/responses", lambda route: route.fulfill(body=events(hostile), content_type="text/event-stream"), times=1
    )
    chat.open()
    assert chat.say(hostile) == hostile
    chat.act("edit", 0)  # two branches: the tree shows it, too
    reply(chat, 500, hostile)
    chat.say(hostile)
    expect(chat.page.locator(".turn.failed .status")).to_have_text(hostile)
    chat.open()
    assert chat.page.locator("#branches .title").first.inner_text().startswith("<img")
    assert chat.page.locator("#model").inner_text() == hostile
    assert chat.page.locator("main img, nav img, main script").count() == 0
    assert chat.page.evaluate("window.hacked") is None


def test_scripts_that_are_not_of_the_page_do_not_run(chat: Chat) -> None:
    chat.page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.hacked = 1";
          document.body.append(script);
        }"""
    )
    assert chat.page.evaluate("window.hacked") is None
    [refused] = chat.problems
    chat.problems.clear()
    assert "inline script" in refused


def test_page_asks_nobody_else(chat: Chat) -> None:
    asked: list[str] = []
    other = chat.context.new_page()
    other.on("request", lambda request: asked.append(request.url))
    other.goto(chat.url)
    expect(other.locator("#model")).not_to_be_empty()
    assert asked and all(url.startswith(chat.url) for url in asked)


# Every screen


def test_phone_shows_everything_without_sideways_scrolling(browser: Browser, server: str) -> None:
    phone = Chat(browser, server, viewport=dict(width=360, height=640), is_mobile=True, has_touch=True)
    phone.fresh()
    phone.say("Hello " + "x" * 300)
    page = phone.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    expect(page.locator("#meter-toggle")).to_contain_text("KV cache")
    expect(page.locator("#plot")).not_to_be_visible()
    page.tap("#meter-toggle")
    expect(page.locator("#plot")).to_be_visible()
    page.tap("#meter-toggle")

    expect(page.locator("#new")).not_to_be_visible()
    page.tap("#open-sidebar")
    expect(page.locator("#new")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#new")).not_to_be_visible()
    expect(page.locator("#open-sidebar")).to_be_focused()
    phone.context.close()
    assert phone.problems == []


def test_everything_is_reached_with_the_tab_key_and_focus_is_visible(chat: Chat) -> None:
    chat.say("one")
    chat.page.focus(".skip")
    reached = []
    for _ in range(11):
        chat.page.keyboard.press("Tab")
        reached.append(
            chat.page.evaluate(
                """() => {
                  const at = document.activeElement, box = at.closest(".box") ?? at;
                  const style = getComputedStyle(at);
                  const marked = style.outlineStyle !== "none" || getComputedStyle(box).boxShadow !== "none";
                  return [at.ariaLabel || at.textContent.trim(), marked && Number(style.opacity) > 0.9];
                }"""
            )
        )
    names = [name for name, _ in reached]
    wanted = ["Settings", "New conversation", "one", "Delete one", "Load a state file", "Edit", "Retry", "Save state"]
    assert [name for name in names if name in wanted] == wanted
    assert names.index("Message") > names.index("Save state") and names.index("Send") > names.index("Message")
    assert [name for name, marked in reached if not marked] == []


def test_stream_is_announced_in_sentences(chat: Chat) -> None:
    body = events("Once", " upon. ", "A", " time")
    chat.page.route("**/v1/responses", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    chat.say("Hello")
    live = chat.page.locator("[aria-live=polite]")
    assert "".join(live.all_text_contents()).split() == ["Once", "upon.", "A", "time"]


def test_dark_mode_and_reduced_motion_are_followed(chat: Chat) -> None:
    def style(selector: str, name: str) -> str:
        script = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
        return chat.page.evaluate(script, [selector, name])

    grounds = []
    for scheme in ("light", "dark"):
        chat.page.emulate_media(color_scheme=scheme)
        grounds.append(style("body", "backgroundColor"))
    assert style("#state-bar", "transitionDuration") != "0s"
    chat.page.emulate_media(reduced_motion="reduce")
    assert style("#state-bar", "transitionDuration") == "0s"
    light, dark = ([int(part) for part in re.findall(r"\d+", ground)[:3]] for ground in grounds)
    assert min(light) > 200 and max(dark) < 60
