"""Take pictures of the pages of the Dagster UI for the documents: `make screenshots`.

Next to the pictures of a page, its words are stored as `<name>.txt`. `tests/docs/test_pictures.py`
compares them with the sentences that the product writes now.

Runs the demonstration with default settings, and takes each page while data flows, in light and in
dark. It takes about eight minutes and needs Chromium.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image
from selenium.common.exceptions import WebDriverException

from kcl_pipeline.clock import SystemClock
from tests.support.browser import MISSING, Browser, browser

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "docs" / "figures" / "ui"
PER_SECOND: Final = 600
SECONDS_OF_DATA: Final = 480
PROGRESS_LINES: Final = 50
"""Lines of progress, one in five seconds, before the first picture: several reports of the leader,
so that plots have lines.
"""
NO_DATA: Final = re.compile(r"committed +0 ")
COLOURS: Final = 128
START: Final = "the Dagster UI is at "
TEMPORARY: Final = re.compile(rf"{re.escape(tempfile.gettempdir())}/\w+/run/")
CLOCK: Final = SystemClock()
THEMES: Final = ("light", "dark")
LOCATION: Final = "locations/orders"


def _show_workers(page: Browser) -> None:
    page.driver.execute_script(
        "arguments[0].scrollIntoView()",
        page.driver.find_element("xpath", "//*[normalize-space(text())='worker_rows']"),
    )


def _open_plots(page: Browser) -> None:
    page.click("Plots")
    page.wait_for_lines(5, seconds=120)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the Dagster UI.

    Attributes:
        name: Name of the pictures.
        path: Path below the address of the UI.
        texts: What the page shows when it is complete.
        open: What is clicked before the picture is taken.
    """

    name: str
    path: str
    texts: tuple[str, ...]
    open: Callable[[Browser], None] = lambda _: None


PAGES: Final = (
    Page("lineage", f"{LOCATION}/asset-groups/orders/lineage", ("fleet", "Materialized")),
    Page("output", "assets/orders/orders?view=overview", ("Plots",), _open_plots),
    Page("leases", "assets/orders/fleet?view=overview", ("lease_rows", "last_moves")),
    Page("workers", "assets/orders/fleet?view=overview", ("worker_rows",), _show_workers),
    Page("sensor", f"{LOCATION}/sensors/orders_leader", ("orders_leader", "View logs")),
)


def take(page: Page, url: str, looker: Browser, folder: Path) -> list[str]:
    """Take one page in each theme; returns a sentence for each picture that is missing."""
    missing = []
    for theme in THEMES:
        looker.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": theme}]},
        )
        try:
            looker.open(f"{url}/{page.path}")
            looker.wait_for(*page.texts, seconds=120)
            page.open(looker)
        except (AssertionError, WebDriverException) as error:
            missing.append(f"{page.name}-{theme}: {str(error).splitlines()[0]}")
            continue
        if theme == THEMES[0]:
            words = TEMPORARY.sub("", looker.text())
            (folder / f"{page.name}.txt").write_text(words + "\n", encoding="utf-8")
        picture = Image.open(looker.shoot(f"{page.name}-{theme}")).convert("RGB")
        picture.quantize(COLOURS).save(folder / f"{page.name}-{theme}.png", optimize=True)
    return missing


def main() -> int:
    """Run the demonstration and take all pages; 1 if one is missing."""
    if MISSING:
        print(f"screenshots need a browser; there is no {' and no '.join(MISSING)}")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "kcl_pipeline.cli", "dev"]
    command += ["--events", str(PER_SECOND * SECONDS_OF_DATA), "--per-second", str(PER_SECOND)]
    with tempfile.TemporaryDirectory() as folder:
        demo = subprocess.Popen(
            [*command, "--folder", f"{folder}/run"], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        try:
            return _take_all(demo.stdout or (), Path(folder))
        finally:
            demo.send_signal(signal.SIGINT)
            demo.communicate(timeout=180)


def _take_all(lines: Iterable[str], folder: Path) -> int:
    url, committed = "", 0
    missing: list[str] = []
    for line in lines:
        print(line, end="", flush=True)
        if START in line:
            url = line.partition(START)[2].strip()
        # Without data, the plots would be empty.
        committed += NO_DATA.search(line) is None and "committed" in line
        if committed >= PROGRESS_LINES:
            break
    with browser(folder) as looker:
        for page in PAGES:
            missing += take(page, url, looker, FOLDER)
    print("\n".join(missing) or f"{len(PAGES) * len(THEMES)} pictures in {FOLDER}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
