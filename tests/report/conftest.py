"""A real browser, once for all; helpers on the path."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--hide-scrollbars", "--window-size=1200,1000",
)  # fmt: skip


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Start Chromium once."""
    from invented import CHROMIUM, DRIVER
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    service = Service(DRIVER, log_output=subprocess.DEVNULL)
    driver = webdriver.Chrome(options, service)
    yield driver
    driver.quit()


@pytest.fixture
def show(browser):
    """Open a page and wait until its charts are drawn; light, wide, nothing logged."""
    from selenium.webdriver.support.ui import WebDriverWait

    def shown(path, *, dark=False, width=1200):
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1}
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**size, "mobile": width < 500}
        )
        browser.get("about:blank")
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.get(Path(path).as_uri())
        WebDriverWait(browser, 60, 0.05).until(
            lambda b: b.execute_script("return document.documentElement.dataset.ready")
        )
        return browser

    return shown
