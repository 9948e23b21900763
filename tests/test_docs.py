"""The documentation: complete where it is generated, and true where it names commands, options, files and links."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from mu_grpo_trl import stage_cli
from mu_grpo_trl.cli import COMMANDS
from mu_grpo_trl.config import REFUSED
from mu_grpo_trl.train import PARSED_CLASSES
from tools.docs_hooks import PAGES, site_link
from tools.options_page import GROUPS, HERE, PAGE, UNITS, own_options, page

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "recipes/README.md")
] + DOCS
OPTIONS = {field.name for options in PARSED_CLASSES for field in fields(options)}
QUICKSTART_OPTIONS = {"task", "engine", "seed", "output"}

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
COMMAND = re.compile(r"(?:\.venv/bin/)?(make|mu-grpo|python3? -m|accelerate launch)(?= )")


def by_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(path.read_text()) if language in languages]


def commands(path: Path) -> Iterator[list[str]]:
    """Words of every command of this project in the shell blocks and code spans of a page, and in its tables."""
    lines = [line for text in blocks(path, "bash", "console", "sh") for line in text.replace("\\\n", " ").splitlines()]
    lines += SPAN.findall(FENCE.sub("", path.read_text()))
    for line in lines:
        for part in re.split(r"&&|\|\||;", line.partition(" #")[0]):
            found = COMMAND.search(part.replace("\\$", "$"))
            if found and not part[: found.start()].strip(" \t$("):
                yield words_of(part[found.start() :].replace("…", ""))


def words_of(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a command within quotes, of which one closes behind it
        return shlex.split(command.rstrip().rstrip("\"'"))


def make_targets() -> set[str]:
    targets = re.findall(r"^([\w. -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target for line in targets for target in line.split()}


def fault_of(words: list[str]) -> str | None:
    """What is wrong with a command, or None."""
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        wrong = [word for word in rest if "=" not in word and word not in make_targets()]
        return f"no target {wrong}" if wrong else None
    if program == "accelerate":
        at = rest.index("-m") if "-m" in rest else len(rest)
        return fault_of_module(rest[at + 1 :]) if at < len(rest) else None
    if program == "mu-grpo":
        return fault_of_subcommand(rest)
    return fault_of_module(rest[rest.index("-m") + 1 :])


def fault_of_module(words: list[str]) -> str | None:
    module, *rest = words
    if module == "mu_grpo_trl.train":
        return fault_of_options(rest, OPTIONS)
    if any(part.isupper() for part in module.split(".")):
        return None  # `benchmarks.NAME`
    return None if importlib.util.find_spec(module) else f"no module {module}"


def fault_of_subcommand(words: list[str]) -> str | None:
    command, *rest = words or ["--help"]
    if command == "--help":
        return None
    names = command.split("|")
    if not COMMANDS.keys() >= set(names):
        return f"no command {command}"
    if command == "train":
        return fault_of_options(rest, OPTIONS)
    if command == "quickstart":
        return fault_of_options(rest, OPTIONS | QUICKSTART_OPTIONS)
    if command == "stage" and rest and "|" not in rest[0]:
        try:
            stage_cli.make_parser().parse_args(
                rest if len(rest) > 1 else [*rest, "PATH", "REPO"][: 2 + (rest == ["push"])]
            )
        except SystemExit:
            return "not what `mu-grpo stage` takes"
    return None


def fault_of_options(words: list[str], options: set[str]) -> str | None:
    given = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
    unknown = [name for name in given if name not in options | {"config", "help", "key"}]
    return f"no option {unknown}" if unknown else None


def anchors(path: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", path.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_the_page_of_options_is_what_the_code_declares():
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tools.options_page`"


def test_the_page_of_options_has_each_option_once():
    named = Counter(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert named.keys() == OPTIONS
    assert {name for name, times in named.items() if times > 1} == set()


def test_every_option_has_an_effect_and_every_duration_a_unit():
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(OPTIONS) - len(REFUSED)
    assert [name for name, _, effect in rows if len(effect) < 8] == []
    assert [name for name, unit, _ in rows if name.endswith("_s") and unit != "seconds"] == []


def test_groups_and_units_name_options():
    grouped = [name for names in GROUPS.values() for name in names]
    assert set(grouped) <= {option.name for option in own_options()}
    assert len(set(grouped)) == len(grouped)
    assert UNITS.keys() | HERE.keys() <= OPTIONS - REFUSED.keys()


@pytest.mark.parametrize("path", TEXTS, ids=by_name)
def test_commands_exist(path: Path):
    faults = {" ".join(words): fault for words in commands(path) if (fault := fault_of(words))}
    assert faults == {}


def test_commands_are_found():
    found = [words[:3] for words in commands(ROOT / "README.md")]
    assert ["make", "quickstart", "ENGINE=vllm"] in found
    assert ["accelerate", "launch", "--config_file"] in found
    assert [".venv/bin/mu-grpo", "train", "--config"] in found


@pytest.mark.parametrize(
    "command",
    ["make quickstrat", "mu-grpo trian", "mu-grpo train --stage_update 3", "mu-grpo stage mend PATH",
     "python -m mu_grpo_trl.training", "accelerate launch -m mu_grpo_trl.train --confg x"],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_found(command: str):
    assert fault_of(shlex.split(command)) is not None


@pytest.mark.parametrize("path", TEXTS, ids=by_name)
def test_recipes_in_pages_have_only_options(path: Path):
    for text in blocks(path, "yaml"):
        content = yaml.safe_load(text)
        if isinstance(content, dict) and OPTIONS & content.keys():
            assert content.keys() - OPTIONS - {"base", "env"} == set()


@pytest.mark.parametrize("path", TEXTS, ids=by_name)
def test_files_of_recipes_exist(path: Path):
    named = set(re.findall(r"\brecipes/[\w./-]+\.ya?ml", path.read_text()))
    assert [name for name in named if "NAME" not in name and not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", TEXTS, ids=by_name)
def test_links_lead_somewhere(path: Path):
    broken = []
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_navigation():
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = [page for section in navigation for pages in section.values() for page in pages]
    paths = {path for page in named for path in page.values()}
    assert paths == {path.relative_to(ROOT / "docs").as_posix() for path in DOCS} | PAGES.keys()


def test_links_of_the_site():
    repository = "https://example.org/repository"
    for target, source, folder, expected in (
        ("guarantees.md", "docs/index.md", "", "guarantees.md"),
        ("../CONTRIBUTING.md", "docs/index.md", "", "contributing.md"),
        ("../../CONTRIBUTING.md", "docs/lab/README.md", "lab", "../contributing.md"),
        ("docs/reliability.md", "CONTRIBUTING.md", "", "reliability.md"),
        ("../docs/performance.md", "benchmarks/README.md", "", "performance.md"),
        ("../recipes/quickstart.yaml", "docs/index.md", "", f"{repository}/blob/main/recipes/quickstart.yaml"),
        ("../tests/faults", "docs/reliability.md", "", f"{repository}/tree/main/tests/faults"),
        ("../nowhere.py", "docs/index.md", "", "../nowhere.py"),
    ):
        assert site_link(target, source, folder, repository) == expected


class _Loaded(HTMLParser):
    """Addresses that a page of HTML loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(values.get("src") or "")
        if tag == "link" and values.get("rel") != "canonical":
            self.addresses.append(values.get("href") or "")


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(DOCS)
    for html in pages:
        loaded = _Loaded()
        loaded.feed(html.read_text(encoding="utf-8"))
        assert [address for address in loaded.addresses if re.match(r"(\w+:)?//", address)] == [], html
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("MuGRPOTrainer", "mu_grpo_objective", "Schedule", "StageReader"):
        assert re.search(rf'id="[\w.]*\b{name}"', api)
    assert "[<code>" not in api
