"""What the documentation names exists: files, modules, settings, variables, metrics and commands within sentences."""

import re
import shlex

import pytest

from kvconnector.config import SECTIONS, ConnectorConfig
from tests.docs.blocks import FENCE, ROOT
from tests.docs.commands import check

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # it also names what is gone
)
FOLDERS = ("kvconnector", "kernels", "examples", "scripts", "tests", "docs", ".ci", ".github")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PLACEHOLDERS = re.compile(r"\.\.\.|\b[A-Z]{3,}\b")


def _source(*patterns):
    files = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))


CODE = _source("kvconnector/**/*.py", "kernels/**/*.py", "*.py")
ALL_CODE = CODE + _source(
    "scripts/*", "scripts/**/*.py", "tests/**/*.py", "examples/**/*.py", "examples/**/*.yaml"
)


def spans(page):
    """Return what stands between backticks in a page's sentences and tables."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return sorted({" ".join(span.split()) for span in SPAN.findall(text)})


def _has_file(path):
    return any(ROOT.glob(path.partition("::")[0].rstrip("/")))


def _has_module(name):
    """Look for a module, for a name that the module before it defines, or for a phase of a request's trace."""
    first, *parts = name.split(".")
    folder = ROOT / "kernels" / first if first.endswith("_kernels") else ROOT / first
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    if not parts or f'"{".".join(parts)}"' in CODE:
        return True
    source = folder / f"{parts[0]}.py"
    if source.exists():
        parts.pop(0)
    else:
        source = folder / "__init__.py"
    return not parts or bool(re.search(rf"\b{parts[0]}\b", source.read_text(encoding="utf-8")))


def _has_setting(name):
    section, _, field = name.partition(".")
    return section not in SECTIONS or field in (*SECTIONS[section].__struct_fields__, "py")


def _has_variable(name):
    words = name.removeprefix("KVCONNECTOR_").lower()
    of_a_section = (
        words.removeprefix(f"{section}_") in struct.__struct_fields__
        for section, struct in SECTIONS.items()
        if words.startswith(f"{section}_")
    )
    return words in ConnectorConfig.__struct_fields__ or any(of_a_section) or name in ALL_CODE


def _has_metric(name):
    base = re.sub(r"^(?:vllm:)?kvconnector_|_(?:total|bucket|count|sum)$", "", name)
    return f'"{base}"' in CODE


KINDS = [
    (rf"^(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*:-]+(?=$| )", _has_file),
    (r"(?<![\w:.])kvconnector(?:_kernels)?(?:\.\w+)+", _has_module),
    (r"^\w+\.\w+(?==|$)", _has_setting),
    (r"\bKVCONNECTOR_[A-Z_]+\w", _has_variable),
    (r"(?:\bvllm:)?\bkvconnector_(?!kernels)[a-z_]+\w", _has_metric),
]


def _missing(span):
    """Return what a span names that does not exist."""
    return [
        name for pattern, exists in KINDS for name in re.findall(pattern, span) if not exists(name)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
    assert not [name for span in spans(page) for name in _missing(span)]


CALLS = [
    (page, span)
    for page in PAGES
    for span in spans(page)
    if re.match(r"scripts/\w+ ", span) and not PLACEHOLDERS.search(span)
]


@pytest.mark.parametrize("page, call", CALLS)
def test_scripts_named_within_sentences_take_their_options(page, call):
    check(shlex.split(call))


@pytest.mark.parametrize(
    "span",
    [
        "kvconnector/no_such.py",
        "tests/unit/test_no_such.py::test_x",
        "kvconnector.session.no_such",
        "kvconnector.no_such.module",
        "staging.no_such_bytes",
        "KVCONNECTOR_STAGING_" + "NO_SUCH=1",
        "kvconnector_no_such_total",
        "vllm:kvconnector_no_such",
    ],
)
def test_a_name_that_nothing_has_is_found(span):
    assert list(_missing(span))
