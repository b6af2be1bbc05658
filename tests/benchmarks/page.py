"""Writes tables into the sections of a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping


def insert_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with each table between the marks of its section, and the rest as it was.

    The marks of the section NAME are the lines ``<!-- NAME -->`` and ``<!-- /NAME -->``. Raises
    `ValueError` if the page does not have each of them once, in this order.
    """
    for name, table in tables.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, _, rest = page.partition(start)
        if page.count(start) != 1 or page.count(end) != 1 or end not in rest:
            raise ValueError(f"the page must have {start.strip()} and then {end.strip()}, once")
        page = f"{before}{start}\n{table.strip()}\n\n{end}{rest.partition(end)[2]}"
    return page
