"""The page stands alone, says what `explain` says, and hostile names stay text."""

from __future__ import annotations

from html.parser import HTMLParser

from meshplan.report.html import html_page
from tests.report.example import llama

ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "caption", "thead", "tbody", "tr", "th",
    "td", "span", "small", "br", "details", "summary", "pre", "ul", "li", "code",
}  # fmt: skip


class Page(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data + "\n"


def test_the_page_shows_what_explain_shows():
    text = Page(html_page(llama())).text
    shown = ["llama-tiny", "layers.[0-1] ×2", "all_gather 4.0 MiB", "80 MiB", "network", "seq % tp == 0", "llama.py:31"]
    assert [expected for expected in shown if expected not in text] == []


def test_the_page_loads_nothing_and_runs_nothing():
    page = html_page(llama())
    assert "http://" not in page and "https://" not in page and "url(" not in page
    assert "default-src 'none'" in page
    assert Page(page).tags <= ALLOWED


def test_hostile_names_are_text():
    evil = "</title></style><script>alert(1)</script><img src=x onerror='a()'>\" onload=\"b()"
    d = llama()
    d.update(model=evil, warnings=[evil], notes=[evil], conditions=[evil], rules=[evil], counts={evil: evil})
    for c in d["collectives"]:
        c.update(module=c["module"] + "." + evil, tensor=evil, where=evil, axis=evil)
    for p in d["placements"]:
        p.update(name=p["name"] + "." + evil, layout={evil: evil})
    d["boundaries"] = [{**b, "side": evil, "from": evil} for b in d["boundaries"]]
    page = Page(html_page(d))
    assert page.tags <= ALLOWED
    assert page.attributes == Page(html_page(llama())).attributes
    assert page.text.count("<script>alert(1)</script>") > 10
