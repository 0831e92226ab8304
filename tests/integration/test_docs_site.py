"""The site of the documentation as `make docs` builds it, in the browser in which it is read."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_train import recipes
from tests.support.browser import CHROMIUM, Browser, opened

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["index.html", "docs/index.html", "docs/elastic.html", "reference/flags.html", "reference/api.html"]
SEARCH = """
new Promise((done) => {
  const results = document.querySelector(".md-search-result");
  const look = () => {
    const links = [...results.querySelectorAll(".md-search-result__link")].map((link) => link.href);
    if (links.length) done(links);
  };
  new MutationObserver(look).observe(results, { childList: true, subtree: true });
  const query = document.querySelector(".md-search__input");
  query.focus();
  query.value = "clip-norm";
  query.dispatchEvent(new Event("keyup", { bubbles: true }));
})
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site; a link or an anchor that leads nowhere, or a name without documentation, fails it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """Return a tab of Chromium, which has a process more for each page that it has opened."""
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH (apt-get install chromium)")
    with opened(tmp_path / "profile") as tab:
        yield tab


def test_references_are_made_of_the_code(site: Path) -> None:
    """Each setting can be linked to, and the docstrings of public names are there."""
    flags = (site / "reference" / "flags.html").read_text(encoding="utf-8")
    targets = set(re.findall(r'<dt id="train--([a-z-]+)"', flags))
    assert {name.replace("_", "-") for name in recipes.digits().settings()} <= targets
    names = (site / "reference" / "api.html").read_text(encoding="utf-8")
    assert "Train as <code>config</code> says, on the ranks that the launcher has started" in names
    assert 'id="hvd_train.Task' in names


def test_pages_fit_and_ask_no_server(browser: Browser, site: Path) -> None:
    """Opened from the file system, at a desk and on a phone: nothing on the console, nothing from a network."""
    for page, width in itertools.product(PAGES, (1280, 390)):
        browser.open(site / page, width=width)
        assert browser.complaints() == [], page
        assert {address.partition(":")[0] for address in browser.requests()} <= {"file", "data"}, page
        assert browser.value("document.documentElement.scrollWidth") <= width, page


def test_the_search_works_without_a_server(browser: Browser, site: Path) -> None:
    """It finds a flag by its name, in a page that was opened from the file system."""
    browser.open(site / "index.html", width=1280)
    answer = browser.call("Runtime.evaluate", expression=SEARCH, awaitPromise=True, returnByValue=True)
    assert any("reference/flags.html" in link for link in answer["result"]["value"])
