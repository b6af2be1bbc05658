"""Check a built site for markup shown as text, redirects and the search: check_site.py SITE."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from bs4 import BeautifulSoup

RAW = re.compile(r"^\||\|\s*$|\*\*|\]\(|```|:::|\{(?:doc|ref|eval-rst)\}|^#{1,4} ", re.M)


def shown_markup(html: str) -> list[str]:
    """Return the lines of a page's article that contain markup, without code and outputs."""
    article = BeautifulSoup(html, "html.parser").find("article")
    if article is None:
        return []
    for code in article.select("pre, code, script, style, svg, dt.sig"):
        code.decompose()
    lines = (line.strip() for line in article.get_text("\n").splitlines())
    return [line for line in lines if line != "|" and RAW.search(line)]


def broken_redirect(page: Path) -> str:
    """Return where a page redirects to, if that page or its anchor is missing; else nothing."""
    refresh = BeautifulSoup(page.read_text(), "html.parser").find("meta", {"http-equiv": "refresh"})
    if refresh is None:
        return ""
    address = str(refresh["content"]).partition("url=")[2]
    name, _, anchor = address.partition("#")
    target = page.parent / name
    if target.is_file():
        html = BeautifulSoup(target.read_text(), "html.parser")
        if html.find("article") and (not anchor or html.find(id=anchor)):
            return ""
    return address


def main(site: Path) -> int:
    """Print what was found, by page; the exit code says whether anything was."""
    pages = sorted(page for page in site.rglob("*.html") if "_static" not in page.parts)
    found = {page: lines for page in pages if (lines := shown_markup(page.read_text()))}
    for page, lines in found.items():
        print(f"{page.relative_to(site)}:", *lines, sep="\n  ")
    print(f"{len(pages)} pages, {len(found)} with markup that is shown as text")
    broken = {page: address for page in pages if (address := broken_redirect(page))}
    for page, address in broken.items():
        print(f"{page.relative_to(site)} redirects to {address}, which does not exist")
    entry = site / "pagefind" / "pagefind-entry.json"
    indexed = json.loads(entry.read_text())["languages"]["en"]["page_count"]
    print(f"{indexed} pages are in the index of the search")
    # _templates/sidebar/search.html replaces it, to list the sections that match best.
    orders = "thinSubResults" in (entry.parent / "pagefind-component-ui.js").read_text()
    if not orders:
        print("this Pagefind has no thinSubResults: see _templates/sidebar/search.html")
    return int(bool(found or broken) or not orders or len(pages) < 40 or indexed < 40)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
