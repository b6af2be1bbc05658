"""A person who goes away while a run goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from conftest import wait_until

from .conftest import Page, Server
from .test_boards import LOAD, LOOP


def test_a_page_closed_during_the_run_and_opened_after_its_end_shows_how_it_ended(
    open_notebook: Callable[..., Page], server: Server
) -> None:
    page = open_notebook("away.ipynb", [LOAD, LOOP.format(count=80)])
    page.wait_for_kernel()
    page.run_all()
    page.wait_for("it/s")
    page.save()
    page.page.context.close()

    def is_over() -> bool:
        with contextlib.suppress(IndexError):
            return not server.ranks() and len(server.ask("api/kernels")) == 1
        return False

    wait_until(is_over, timeout=30)
    back = open_notebook("away.ipynb")
    try:
        back.wait_for("succeeded")
    finally:
        back.shot("away")
