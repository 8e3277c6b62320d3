"""A headless Chromium that looks at the Dagster UI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By

from tests.support.fleet_processes import CLOCK

CHROMIUM = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")
MISSING = [str(path) for path in (CHROMIUM, DRIVER) if not path.exists()]
LINE = 100
"""Shortest width of a line through several points; one point has less than 20."""
SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1600,1200",
)


class Browser:
    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver = driver
        self.folder = folder

    def open(self, url: str) -> None:
        self.driver.get(url)

    def text(self) -> str:
        try:
            return self.driver.find_element(By.TAG_NAME, "body").text
        except StaleElementReferenceException:
            return ""

    def wait_for(self, *texts: str, seconds: float = 45) -> str:
        """Wait until the page shows all of these; the page polls for ever, so there is no moment
        when it is finished.
        """
        deadline = CLOCK.monotonic() + seconds
        while not all(text in (shown := self.text()) for text in texts):
            if CLOCK.monotonic() > deadline:
                self.shoot("missing")
                raise AssertionError(
                    f"{[t for t in texts if t not in shown]} not on "
                    f"{self.driver.current_url}:\n{shown}"
                )
            CLOCK.sleep(0.5)
        return shown

    def lines(self) -> list[int]:
        """Return the width of the coloured line of each plot, in points; 0 without a line."""
        script = """
            return [...document.querySelectorAll("canvas")].map(canvas => {
                const {width, height} = canvas;
                if (!width || !height) return 0;
                const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
                const columns = new Set();
                for (let at = 0; at < data.length; at += 4) {
                    const colours = [data[at], data[at + 1], data[at + 2]];
                    if (data[at + 3] > 128 && Math.max(...colours) - Math.min(...colours) > 60)
                        columns.add((at / 4) % width);
                }
                return columns.size;
            })
        """
        return list(self.driver.execute_script(script))

    def wait_for_lines(self, plots: int, seconds: float = 60) -> None:
        """Wait until the page has at least so many plots with a line, not only a point.

        One plot may have a point: the rows are counted in a small part of the time.
        """
        deadline = CLOCK.monotonic() + seconds
        while True:
            found = self.lines()
            lines = sum(width >= LINE for width in found)
            if lines >= max(plots, len(found) - 1):
                return
            if CLOCK.monotonic() > deadline:
                self.shoot("no-lines")
                raise AssertionError(f"widths of the plots' lines: {found}")
            CLOCK.sleep(0.2)

    def cut_off(self) -> dict[str, float]:
        """By its first row: how many points of each table in the metadata are cut off."""
        script = """
            return [...document.querySelectorAll("table table")].map(table => {
                let holder = table.parentElement;
                while (getComputedStyle(holder).overflowX === "visible") {
                    holder = holder.parentElement;
                }
                const right = holder.getBoundingClientRect().right;
                return [table.rows[0].innerText, table.getBoundingClientRect().right - right];
            }).filter(([, points]) => points > 0)
        """
        return dict(self.driver.execute_script(script))

    def click(self, text: str) -> None:
        """Click the first element whose whole text this is."""
        self.driver.execute_script(
            "arguments[0].click()",
            self.driver.find_element(By.XPATH, f"//*[normalize-space(text())='{text}']"),
        )

    def shoot(self, name: str) -> Path:
        path = self.folder / f"{name}.png"
        assert self.driver.save_screenshot(str(path))
        return path


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for switch in (*SWITCHES, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(switch)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield Browser(driver, folder)
    finally:
        driver.quit()
