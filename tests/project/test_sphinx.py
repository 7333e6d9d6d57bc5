"""The pages in docs/ build without a warning, their code prints what they say, and nothing is left out."""

import dataclasses
import html.parser
import re
import urllib.parse
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.examples import LIBRARIES
from torchcache2 import CacheSettings
from torchcache2.decorator.bypass import REASONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INCLUDED = DOCS / "tables"  # by another page
PAGES = sorted(
    path.relative_to(DOCS).with_suffix("").as_posix()
    for path in DOCS.rglob("*.md")
    if path.parent != INCLUDED
)


SPHINX = "import sys; from sphinx.cmd.build import main; sys.exit(main())"


def sphinx(builder, output, doctrees, *, docs=DOCS):
    arguments = "-W", "-b", builder, "-d", doctrees, docs, output
    run = warm.start(SPHINX, *arguments, cwd=output.parent, imports=LIBRARIES)  # not in the repository
    run.wait(300)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("docs")


@pytest.fixture(scope="module")
def built(folder):
    run = sphinx("html", folder / "html", folder / "doctrees")
    run.done()
    return folder / "html"


class Page(html.parser.HTMLParser):
    """Links, anchors and other files of a built page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.files = [], set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        elif tag in ("img", "script", "link", "source"):
            self.files += filter(None, map(attributes.get, ("src", "href")))


def broken(folder):
    """Links of built pages to what is not there, and what a reader's browser would fetch from elsewhere."""
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links + page.files:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                if link in page.files:
                    yield f"{path.name}: {link} is loaded from elsewhere"
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            anchor = urllib.parse.unquote(url.fragment)
            if not target.is_file():
                yield f"{path.name}: {link} is no file"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{path.name}: {link} is no anchor"


def contents(folder):
    """Pages that the table of contents in the sidebar of the first page leads to, and that page."""
    sidebar = re.search(r'class="sidebar-tree".*?</aside>', (folder / "index.html").read_text(), re.DOTALL)
    links = re.findall(r'href="([^"#:]+)\.html"', sidebar[0])
    return sorted({"index", *links})


@pytest.mark.slow
def test_every_page_is_built_and_in_the_table_of_contents(built):
    assert {"quickstart", "keys", "bypasses", "pytorch", "verify", "performance", "api"} <= set(PAGES)
    assert contents(built) == PAGES


@pytest.mark.slow
def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(built):
    assert list(broken(built)) == []


def test_the_check_finds_planted_links(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"><a href="#gone"><a href="b.html#gone"><a href="c.html">'
        '<a href="https://example.org"><script src="https://example.org/x.js"></script>'
    )
    assert sorted(broken(tmp_path)) == [
        "a.html: #gone is no anchor",
        "a.html: b.html#gone is no anchor",
        "a.html: c.html is no file",
        "a.html: https://example.org/x.js is loaded from elsewhere",
    ]


@pytest.mark.slow
def test_the_code_on_the_pages_and_in_the_docstrings_prints_what_they_say(folder, built):
    run = sphinx("doctest", folder / "doctest", folder / "doctrees")
    report = (folder / "doctest" / "output.txt").read_text(encoding="utf-8")
    assert run.poll() == 0, report
    assert "cannot read" not in run.err  # a key covers source code, which a doctest has
    for page in ("quickstart", "keys", "bypasses", "pytorch", "verify", "options", "api"):
        assert f"Document: {page}\n" in report


@pytest.mark.slow
def test_code_that_prints_something_else_is_found(tmp_path):
    docs = tmp_path / "docs"
    (docs / "_static").mkdir(parents=True)
    (docs / "conf.py").write_text((DOCS / "conf.py").read_text(encoding="utf-8"), encoding="utf-8")
    (docs / "index.md").write_text("# A page\n\n```{doctest}\n>>> 1 + 1\n3\n```\n", encoding="utf-8")
    run = sphinx("doctest", tmp_path / "out", tmp_path / "doctrees", docs=docs)
    assert run.poll() != 0
    assert "1 failure in tests" in run.out


def test_every_option_has_its_row_and_nothing_else_has():
    rows = re.findall(r"^\| `([a-z]\w*)` \|", (DOCS / "options.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(CacheSettings))


def test_every_reason_not_to_cache_has_its_row_and_nothing_else_has():
    page = (DOCS / "bypasses.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[?`(\w+)`(?:\]\(#\w+\))? \| (\w+) \|", page, re.MULTILINE)
    assert rows == [(reason, REASONS[reason].asked) for reason in REASONS]


def test_every_room_has_its_row_on_the_page_for_maintainers():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "maintaining.md").read_text(encoding="utf-8"), re.MULTILINE)
    rooms = {path.parent.name for path in (ROOT / "torchcache2").glob("*/__init__.py")}
    assert rooms == set(rows)


def test_code_on_the_pages_fits_into_its_column():
    for name in PAGES:
        text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        for kind, block in re.findall(r"^```(python|{doctest})\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            code = [line for line in block.split("\n") if kind == "python" or line[:3] in (">>>", "...")]
            assert [line for line in code if len(line) > 88 and name != "format"] == [], name
