"""Photograph the demo's report for the README: docs/_static/demo.png.

    buoy demo && python tools/pictures/demo.py buoy-demo.html

Needs `chromium` and `chromedriver` on the path.
"""

import argparse
import shutil
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).parents[2]
DRAWN = "return document.documentElement.dataset.ready"


def main() -> None:
    """Open the page in a window without a screen, wait for its charts, and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/_static/demo.png")
    parser.add_argument("--height", type=int, default=1155)
    parser.add_argument("--top", type=int, default=0, help="how far to scroll down")
    chosen = parser.parse_args()
    options = ChromeOptions()
    for option in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(option)
    options.add_argument(f"--window-size=1160,{chosen.height}")
    options.binary_location = shutil.which("chromium") or ""
    service = ChromeService(shutil.which("chromedriver"))
    with Chrome(options, service) as browser:
        browser.get(chosen.page.resolve().as_uri())
        WebDriverWait(browser, 60).until(lambda b: b.execute_script(DRAWN))
        browser.execute_script(f"window.scrollTo(0, {chosen.top})")
        browser.save_screenshot(str(chosen.out))


if __name__ == "__main__":
    main()
