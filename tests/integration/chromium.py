"""A real browser for tests: Chromium without a window, and what a page says of itself in it."""

from __future__ import annotations

import functools
import html
import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Runs before the page's own policy forbids scripts that are not its own, and waits for the page.
DRIVER = """<script>
(() => {
  const faults = [];
  addEventListener("error", (event) => faults.push(String(event.message)));
  addEventListener("unhandledrejection", (event) => faults.push(String(event.reason)));
  addEventListener("securitypolicyviolation", (event) => faults.push(`no ${event.blockedURI}`));
  const pause = () => new Promise((done) => setTimeout(done, 60));
  const one = (what) => document.querySelector(what);
  const all = (what) => [...document.querySelectorAll(what)];
  const text = (what) => one(what)?.textContent.trim() ?? null;
  const type = async (what, value) => {
    const input = one(what);
    input.value = value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    await pause();
  };
  const press = async (what) => { one(what).click(); await pause(); };
  const key = async (what, name) => {
    const event = { key: name, bubbles: true, cancelable: true };
    one(what).dispatchEvent(new KeyboardEvent("keydown", event));
    await pause();
  };
  addEventListener("load", async () => {
    const page = document.documentElement;
    for (let round = 0; round < 400 && !page.dataset.state; round++) await pause();
    const said = {};
    try { await (async () => { STEPS })(); } catch (error) { faults.push(String(error)); }
    said.state = page.dataset.state ?? "never ready";
    said.faults = faults;
    const outcome = document.createElement("pre");
    outcome.id = "outcome";
    outcome.textContent = JSON.stringify(said);
    document.body.append(outcome);
  });
})();
</script>"""


@functools.cache
def find_chromium() -> str | None:
    """The browser's path; `make browser` installs one."""
    asked = os.environ.get("PARITAS_CHROMIUM")
    return asked or next(filter(None, map(shutil.which, NAMES)), None)


def ask_page(page: str, folder: Path, steps: str) -> dict:
    """Load a page, run steps of JavaScript that fill in `said`, and give that back."""
    browser = find_chromium()
    if browser is None:
        pytest.skip("no Chromium: `make browser` installs Debian's; or set PARITAS_CHROMIUM to one")
    file = folder / "page.html"
    assert "<head>\n" in page
    driven = page.replace("<head>\n", f"<head>\n{DRIVER.replace('STEPS', steps)}", 1)
    file.write_text(driven, encoding="utf-8")
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,1600",
            "--virtual-time-budget=60000",
            "--dump-dom",
            file.as_uri(),
        ],
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    found = re.search(r'<pre id="outcome">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the page never came to an end:\n{done.stderr[-2000:]}"
    return json.loads(html.unescape(found.group(1)))
