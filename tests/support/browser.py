"""A real browser for tests: Debian's Chromium without a screen, driven by Playwright; axe-core, which judges accessibility.

    with open_browser() as browser:
        page = browser.new_page()
        page.goto(url)
        assert violations(page) == []
        keep_picture(page, "overview")

While a browser is open, `asyncio.run` cannot be called in the same thread.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from functools import cache
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.conftest import require
from tests.support.processes import SOURCE

AXE_VERSION = "4.10.3"
PICTURES = SOURCE.parent / "build" / "pictures"
TIMEOUT_MS = 30_000  # on a machine with other load
WINDOW = {"width": 1200, "height": 900}
PHONE = {"width": 390, "height": 800}
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_WATCH_POLICY = """
window.refusedByPolicy = [];
document.addEventListener("securitypolicyviolation", (event) =>
    window.refusedByPolicy.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`));
"""
_RULES = """() => axe.run({runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}).then(found => found.violations
    .filter(one => ["serious", "critical"].includes(one.impact))
    .map(one => `${one.id}: ${one.nodes.map(node => node.html + " " + node.failureSummary).join("; ").slice(0, 400)}`))"""


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Run a browser with a profile of its own."""
    program = shutil.which("chromium")
    require("Chromium", program is not None, "make system-deps")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@cache
def _axe() -> str:
    """Return the script of axe-core, from the package that npm fetched once."""
    folder = SOURCE.parent / "build" / f"axe-core-{AXE_VERSION}"
    script = folder / "package" / "axe.min.js"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm = shutil.which("npm")
        require("npm", npm is not None, "make system-deps")
        command = [str(npm), "pack", "--silent", f"axe-core@{AXE_VERSION}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        require("axe-core", done.returncode == 0, f"npm pack: {done.stderr.strip()[-300:]}")
        with tarfile.open(folder / done.stdout.strip()) as archive:
            archive.extract("package/axe.min.js", folder, filter="data")
    return script.read_text("utf-8")


def violations(page: Page) -> list[str]:
    """Return what axe-core finds that is serious."""
    page.evaluate(_axe())
    found: list[str] = page.evaluate(_RULES)
    return found


def keep_picture(page: Page, name: str) -> None:
    """Keep a picture of what the page shows, for people to look at."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


def new_context(browser: Browser, **options: Any) -> BrowserContext:
    """Return a browser's window without cookies, which says yes to every question."""
    context = browser.new_context(**{"viewport": WINDOW, "locale": "en-GB", **options})
    context.set_default_timeout(TIMEOUT_MS)
    context.on("dialog", lambda dialog: dialog.accept())
    context.add_init_script(_WATCH_POLICY)
    return context


def refused_by_policy(page: Page) -> list[str]:
    """Return what the Content-Security-Policy of the page has refused so far."""
    found: list[str] = page.evaluate("window.refusedByPolicy")
    return found


def look_at(page: Page, url: str, names: tuple[str, ...], picture: str) -> None:
    """Look at each screen at two widths: nothing that its policy refuses, nothing serious against accessibility, nothing wider
    than the page."""
    for name in names:
        screen, _, one = name.partition("?")[0].strip("/").partition("/")
        place = "-".join([picture, screen or "overview", *([one if one == "new" else "one"] if one else [])])
        page.set_viewport_size(WINDOW)
        page.goto(f"{url}/ops/{name}", wait_until="networkidle")
        assert refused_by_policy(page) == [], name
        assert violations(page) == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= WINDOW["width"], f"{name} scrolls"
        keep_picture(page, place)
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], f"{name} scrolls on a phone"
        keep_picture(page, f"{place}-phone")
