"""The documentation: it builds without a warning, leads nowhere wrong, fetches nothing, and its commands parse."""

import importlib.util
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import processes
from code_blocks import SHELLS, code_blocks, ddc_arguments, parse_only
from ddc.cli import available
from ddc.operators import OPERATORS
from ddc.problems import TASKS
from ddc.solvers import SOLVERS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


class Page(HTMLParser):
    """The addresses and anchors of a built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and "src" in given:
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") != "canonical" and "href" in given:
            self.loaded.append(given["href"])


def mkdocs(words: list[str]) -> None:
    from mkdocs.__main__ import cli

    cli(words)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it, with every proxy pointing nowhere."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    environment = os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}
    built = processes.run(["build", "--strict", "--site-dir", folder], environment, ROOT, call=mkdocs)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr + built.stdout
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_internal_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    wrong, count = [], 0
    for path, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(parts.fragment)
            if not target.is_file():
                wrong.append(f"{path.name}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors | {"__top"}:
                wrong.append(f"{path.name}: {link} has no such place")
    assert not wrong and count > 300


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    loaded = [address for page in pages.values() for address in page.loaded]
    assert loaded and not [address for address in loaded if urlsplit(address).netloc]
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import\s+url\(\s*['\"]?https?:|fonts\.googleapis", sheet.read_text())


def test_the_pages_that_people_look_for_are_there(site: Path, pages: dict[Path, Page]) -> None:
    names = {path.stem for path in pages}
    assert {path.stem for path in PAGES} <= names
    assert not (site / "hooks.py").exists()


def test_tables_name_everything_there_is(site: Path) -> None:
    solvers, operators = (site / "solvers.html").read_text(), (site / "operators.html").read_text()
    for name in SOLVERS:
        assert f'id="{name}"' in solvers and f"<code>{name}</code>" in solvers
    for name in (*OPERATORS, *TASKS):
        assert f"<code>{name}</code>" in operators
    cli = (site / "cli.html").read_text()
    assert all(f'id="ddc-{name}"' in cli for name in available())
    assert "--skip-existing" in cli and "RestorationPipeline" in (site / "api.html").read_text()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_is_used_and_every_solver_has_its_equation() -> None:
    hooks = load(ROOT / "docs" / "hooks.py")
    assert set(hooks.EQUATIONS) == set(SOLVERS)
    used = re.findall(r"<!-- generated: (\w+) -->", "".join(path.read_text() for path in PAGES))
    assert sorted(used) == sorted(hooks.GENERATED)
    loop = hooks._loop(SOLVERS["ddc"])
    assert loop.startswith("for t, s in run.steps(self.pairs(schedule)):") and "network.consistent" in loop
    assert "regularised" not in loop and "def dps_step" in hooks._loop(SOLVERS["dps"])


def test_the_papers_tables_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    maker = load(ROOT / "scripts" / "paper_page.py")
    assert maker.written(page) == page
    assert maker.written(re.sub(r"\d\.\d", "0.0", page)).count("25.11 / **0.137**") == 1  # the paper's sr4, table 2
    assert len(maker.results("table1")) == 40 and {row["n"] for row in maker.results("table1")} == {10, 100}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_and_python_of_a_page_can_be_parsed(path: Path) -> None:
    for block in code_blocks(path.read_text()):
        if block.language == "python":
            assert compile(block.text, f"{path.name} line {block.line}", "exec")
        elif block.language in SHELLS:
            for command in block.commands():
                if ddc_arguments(command) is not None:
                    assert parse_only(command) in ("", *available())


def test_citation_names_the_paper() -> None:
    import yaml

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper = citation["preferred-citation"]
    assert "Deep Data Consistency" in paper["title"] and "2405.10748" in str(paper)
    assert [author["family-names"] for author in paper["authors"]] == ["Chen", "Hao", "Xiao"]


def test_the_changelog_has_this_version() -> None:
    from ddc import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
