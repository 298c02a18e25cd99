"""Makes the screenshot of the server's page that the README shows.

    python benchmarks/page_screenshot.py [MODEL] [--out docs/images/page.png] [--tokens 160]

Starts `fastweights serve` (without MODEL: the packaged model), has a short conversation with a fork in a headless
Chromium, and takes the picture while an answer is written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FIRST = "It was a dark evening, and the old man"
NEXT = ("He opened the door, and", "The next morning the captain", "At last the young woman")


@contextmanager
def served(model: str | None) -> Iterator[str]:
    """The address of a server."""
    command = [sys.executable, "-m", "fastweights", "serve", *([model] if model else []), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            announced = server.stdout.readline()  # "NAME is served at ADDRESS; ..."
            yield announced.partition(" is served at ")[2].partition(";")[0]
        finally:
            server.terminate()


def converse(page: Page, tokens: int) -> None:
    """Three turns, two of which follow the same answer; a fourth is still written at the end."""
    page.click("#open-settings")
    page.fill("#temperature", "0.6")
    page.fill("#max-tokens", str(tokens))
    page.click("#settings button[value=save]")
    send(page, FIRST)
    send(page, NEXT[0])
    page.hover(".turn >> nth=0")
    page.click(".turn [data-do=fork] >> nth=0")
    send(page, NEXT[1])
    send(page, NEXT[2], wait=False)
    written = page.locator(".turn:last-child .answer .text")
    expect(written).to_have_text(re.compile(f".{{{tokens // 2}}}", re.DOTALL), timeout=60_000)


def send(page: Page, text: str, wait: bool = True) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")
    if wait:
        page.wait_for_selector(".turn.writing", state="detached", timeout=300_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="converted model; by default the packaged one")
    parser.add_argument("--out", type=Path, default=Path("docs/images/page.png"))
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with served(given.model) as address, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(address)
        converse(page, given.tokens)
        page.screenshot(path=given.out)
        browser.close()
    print(f"{given.out}: {given.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
