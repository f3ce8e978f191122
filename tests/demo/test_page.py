"""The demo's page in a real browser: it says what the results say, offline."""

import shutil
import subprocess

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from buoy.demo.columns import COLUMNS, column_of
from buoy.demo.page import write
from buoy.demo.results import Results
from buoy.demo.train import train
from buoy.demo.workloads import WORKLOADS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument("--window-size=1200,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(DRIVER, log_output=subprocess.DEVNULL)
    driver = webdriver.Chrome(options, service)
    yield driver
    driver.quit()


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="Chromium or its driver is missing: make browser",
    ),
]


def complaints(browser):
    """Give what the browser had to say, other than Bokeh's greeting."""
    return [x for x in browser.get_log("browser") if x["level"] != "INFO"]


def shown(browser, page):
    """Open a page and wait for its charts."""
    browser.get(page.as_uri())
    ready = "return document.documentElement.dataset.ready"
    WebDriverWait(browser, 60, 0.05).until(lambda b: b.execute_script(ready))
    return browser


def results(columns, workloads=("field-1e-3", "letters"), steps=16):
    """Train a little."""
    made = Results([WORKLOADS[name] for name in workloads], columns)
    for workload in made.workloads:
        for column in columns:
            made.outcomes.append(train(workload, column, 0, steps))
    return made


def test_the_page_shows_the_table_the_sentences_and_the_charts(browser, tmp_path):
    """Every figure, its mark, six charts for each training, and no complaint."""
    own = column_of("backoff:init_scale=2^10", COLUMNS["buoy"].policy)
    made = results([COLUMNS[n] for n in ("fp32", "none", "torch", "buoy")] + [own])
    driver = shown(browser, write(made, tmp_path / "demo.html"))

    cells = [row.find_elements(By.TAG_NAME, "td") for row in
             driver.find_elements(By.CSS_SELECTOR, "#results tbody tr")]  # fmt: skip
    scores = [outcome.score for outcome in made.outcomes]
    told = [
        float(cell.get_attribute("data-value")) for row in cells for cell in row[1:]
    ]
    assert scores == told
    assert "trouble" in cells[0][2].get_attribute("innerHTML")
    assert "healthy" in cells[1][2].get_attribute("innerHTML")
    text = driver.find_element(By.ID, "glance").text
    assert all(claim.text in text for claim in made.claims(titles=True))
    charts = driver.find_elements(
        By.CSS_SELECTOR, "#field-1e-3 figure, #letters figure"
    )
    assert 12 == len(charts)
    assert "torch.float16 tensors" in driver.find_element(By.ID, "field-1e-3").text
    assert "emulated here by buoy.emulate" in driver.find_element(By.ID, "letters").text
    assert [] == complaints(driver)


def test_a_page_of_one_run_alone_is_drawn(browser, tmp_path):
    """As when Ctrl-C comes after the very first: FP32 only, said to be unfinished."""
    made = results([COLUMNS["fp32"]], ["bandit"])
    driver = shown(browser, write(made, tmp_path / "part.html", whole=False))

    assert "stopped early" in driver.title
    assert 1 == len(driver.find_elements(By.CSS_SELECTOR, "#bandit figure"))
    assert [] == complaints(driver)
