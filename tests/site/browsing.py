"""What must hold of a page in a browser, each as a function that returns the faults in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage, Page, ViewportSize

WIDE: ViewportSize = {"width": 1280, "height": 900}
NARROW: ViewportSize = {"width": 360, "height": 740}

LANDMARKS = ("header", "nav", "main", "footer")
TABS = 150  # of a page with more controls the first ones are tried
_ALIKE = "tbody tr:nth-child(n+16), :is(pre, .lines) > :nth-child(n+21):not(.lit), li:nth-child(n+31)"
_SERIOUS = ("serious", "critical")
_LOCAL = ("file:", "data:", "blob:")

_STRUCTURE = """landmarks => [
  ...(document.querySelectorAll("h1").length === 1 ? [] : ["not one h1"]),
  ...landmarks.filter((name) => !document.querySelector(name)).map((name) => `no ${name}`),
]"""
_OVERFLOW = """() => {
  const page = document.documentElement;
  if (page.scrollWidth <= page.clientWidth) return [];
  const wide = [...document.body.querySelectorAll("*")].filter((each) =>
    each.getBoundingClientRect().right > page.clientWidth && !each.closest(".wide, svg"));
  const named = wide.slice(0, 3).map((each) => `${each.tagName.toLowerCase()}.${each.className}`);
  return [`${page.scrollWidth} px of ${page.clientWidth}: ${named.join(", ")}`];
}"""
_WATCH_FOCUS = """() => {
  const shown = (each) => each.checkVisibility({ visibilityProperty: true }) && !each.closest("[inert]");
  const chosen = 'a[href], button, input, select, textarea, summary, [tabindex]';
  const all = [...document.querySelectorAll(chosen)].filter((each) => each.tabIndex >= 0 && !each.disabled);
  const told = (each) => `${each.tagName.toLowerCase()} ${(each.name || each.textContent).trim().slice(0, 40)}`;
  const seen = new Set();
  const unmarked = new Set();
  addEventListener("focusin", ({ target }) => {
    const { outlineStyle, outlineWidth, boxShadow } = getComputedStyle(target);
    seen.add(target);
    if ((outlineStyle === "none" || outlineWidth === "0px") && boxShadow === "none") unmarked.add(target);
  });
  const controls = all.filter(shown);
  window.focusFaults = (most) => [
    ...controls.filter((each) => each.tabIndex > 0).map((each) => `${told(each)} is out of order`),
    ...controls.slice(0, most)
      .filter((each) => !seen.has(each) && each.isConnected && shown(each) && each.type !== "radio")
      .map((each) => `${told(each)} is not reached by Tab`),
    ...[...unmarked].map((each) => `${told(each)} does not show that it has the focus`),
  ];
  return controls.length;
}"""
_SCRIPTLESS = """() => {
  const main = document.querySelector("main");
  const elements = [...main.querySelectorAll("*")].filter((each) => each.tagName.startsWith("KT-"));
  return [
    ...(main.innerText.trim().length < 200 ? ["hardly a text"] : []),
    ...(main.querySelector("p, table, ul, ol, dl, pre") ? [] : ["neither prose nor table"]),
    ...elements.filter((each) => !each.hidden && !each.innerText.trim()).map((each) => `${each.tagName} is empty`),
  ];
}"""


@contextmanager
def visit(context: BrowserContext, path: Path) -> Iterator[tuple[Page, list[str]]]:
    """A page, opened from disk, and what is complained of as long as it is open: messages, and what it asks for."""
    page, heard = context.new_page(), list[str]()

    def tell(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            heard.append(f"{message.type}: {message.text}")

    page.on("console", tell)
    page.on("pageerror", lambda error: heard.append(f"raised {error}"))
    page.on("request", lambda request: None if request.url.startswith(_LOCAL) else heard.append(f"asks {request.url}"))
    page.on("requestfailed", lambda request: heard.append(f"does not get {request.url}"))
    page.goto(path.as_uri(), wait_until="load")
    yield page, heard
    page.close()


def structure(page: Page) -> list[str]:
    """One title, and the landmarks that a screen reader goes by."""
    found: list[str] = page.evaluate(_STRUCTURE, list(LANDMARKS))
    return found


def overflow(page: Page) -> list[str]:
    """What is wider than the window."""
    found: list[str] = page.evaluate(_OVERFLOW)
    return found


def inaccessible(page: Page, *, contrast: bool = True, only_contrast: bool = False) -> list[str]:
    """What axe calls serious or critical. Of long tables and listings the rows are alike, and the first ones stay."""
    from axe_playwright_python.sync_playwright import Axe

    # Style sheets are not asked for again, which a page on disk may not.
    options = {"resultTypes": ["violations"], "preload": False, "rules": {"color-contrast": {"enabled": contrast}}}
    options |= {"runOnly": ["color-contrast"]} if only_contrast else {}
    page.evaluate(f"document.querySelectorAll('{_ALIKE}').forEach((each) => each.remove())")
    return [
        f"{found['id']} ({found['impact']}): {node['target']} {node['failureSummary']}"
        for found in Axe().run(page, options=options).response["violations"]
        if found["impact"] in _SERIOUS
        for node in found["nodes"][:3]
    ]


def unreachable(page: Page) -> list[str]:
    """Controls that Tab does not reach, in their order, or that do not show it."""
    controls = page.evaluate(_WATCH_FOCUS)
    for _ in range(min(controls, TABS)):
        page.keyboard.press("Tab")
    found: list[str] = page.evaluate(f"focusFaults({TABS})")
    return found


def scriptless(page: Page) -> list[str]:
    """What a page lacks without JavaScript."""
    found: list[str] = page.evaluate(_SCRIPTLESS)
    return found
