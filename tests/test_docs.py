"""The written part: every link leads somewhere, and the table of limits is that of the code."""

import re
from dataclasses import asdict
from pathlib import Path

from omni_live.sessions.limits import Limits

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def _anchors(page: Path) -> set[str]:
    """The fragments that a page's headings answer to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    dead = []
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (fragment and fragment not in _anchors(target)):
            dead.append(link)
    return dead


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    dead = {str(page.relative_to(ROOT)): dead_links(page) for page in _pages()}
    assert {page: links for page, links in dead.items() if links} == {}


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n[a](#a-heading) [b](#gone) [c](page.md#a-heading) [d](gone.md)\n```\n[e](code)\n```\n"
    )
    assert dead_links(page) == ["#gone", "gone.md"]


def _as_written(name: str, value: float) -> str:
    """A limit's default as the page writes it: with the unit that the setting's name gives."""
    if "_bytes" in name:
        return next(
            f"{value / 2**power:g} {unit}"
            for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB"))
            if value >= 2**power
        )
    unit = next((unit for unit in ("ms", "s") if name.endswith(f"_{unit}")), "")
    return f"{value:.10g} {unit}".rstrip()


def test_the_page_of_limits_has_each_limit_with_its_default() -> None:
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert rows == {name: _as_written(name, value) for name, value in asdict(Limits()).items()}
