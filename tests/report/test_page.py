"""The page in a real browser: it works offline, and says what the trace says."""

import json
import sqlite3

import pytest
from invented import in_browser, record

import buoy.report
from buoy.report import Run

WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
pytestmark = in_browser

STEPS = 2600


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Record one run for all tests here."""
    return record(tmp_path_factory.mktemp("run") / "run.buoy", STEPS)


@pytest.fixture(scope="module")
def page(trace):
    """Write its page."""
    return buoy.report.write([trace], trace.with_name("one.html"))


@pytest.fixture(scope="module")
def both(trace):
    """Write a page of two runs, with a curve of their own."""
    other = record(trace.with_name("other.buoy"), 500, seed=1)
    return buoy.report.write(
        [
            Run(trace, "first", series={"accuracy": {0: 0.1, 2500: 0.9}}),
            Run(other, "second", facts={"accuracy": "0.75"}, note="a shorter one"),
        ],
        trace.with_name("two.html"),
        title="Two runs",
    )


def asked(trace, question):
    """Ask the file itself, not the library."""
    file = sqlite3.connect(trace)
    found = file.execute(question).fetchall()
    file.close()
    return found


def fact(browser, name):
    """Read a figure off the page."""
    return browser.execute_script(
        "return document.querySelector(`[data-fact='${arguments[0]}']`).textContent",
        name,
    )


TIPS = """
const seen = [];
const walk = (node) => {
  for (const child of node.querySelectorAll("*")) {
    if (child.matches(".bk-Tooltip")) seen.push(child.shadowRoot.textContent);
    if (child.shadowRoot) walk(child.shadowRoot);
  }
};
walk(document);
return seen.join(" ");
"""
DRAWN = """
const found = [];
for (const doc of Bokeh.documents) for (const model of doc.all_models)
  if (model.type === "GlyphRenderer" && model.name?.startsWith(arguments[0]))
    found.push([model.name, ...["x", "y"].map(k => [...model.data_source.data[k]])]);
return found;
"""


def complaints(browser):
    """List what the console says beyond Bokeh's own greeting."""
    return [line for line in browser.get_log("browser") if line["level"] != "INFO"]


def requests(browser):
    """List everything that was asked of a network."""
    sent = [json.loads(line["message"]) for line in browser.get_log("performance")]
    urls = [
        entry["message"]["params"]["request"]["url"]
        for entry in sent
        if entry["message"]["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("which", ["page", "both"])
def test_the_page_opens_without_a_message_and_without_a_network(
    show, request, which, dark, width
):
    """No console error, no request, nothing wider than the screen, charts drawn."""
    browser = show(request.getfixturevalue(which), dark=dark, width=width)
    assert complaints(browser) == []
    assert requests(browser) == []
    WebDriverWait(browser, 10, 0.05).until(
        lambda b: b.execute_script("return document.body.scrollWidth") <= width
    )
    theme = browser.execute_script("return document.documentElement.dataset.theme")
    assert theme == ("dark" if dark else "light")
    drawn = "return document.querySelectorAll('.bk-Figure').length"
    assert browser.execute_script(drawn) >= 6


def test_a_request_would_be_seen(show, tmp_path):
    """The test above can fail."""
    page = tmp_path / "leak.html"
    page.write_text(
        "<html data-ready=yes><img src='http://127.0.0.1:9/leak.png'></html>"
    )
    browser = show(page)
    assert requests(browser) == ["http://127.0.0.1:9/leak.png"]
    assert complaints(browser) != []


def test_the_figures_on_the_page_are_those_of_the_file(show, page, trace):
    """Counts, the last scale, the loss."""
    browser = show(page)
    [(steps, missed)] = asked(trace, "SELECT count(*), sum(applied = 0) FROM steps")
    assert fact(browser, "steps") == f"{steps:,}"
    assert fact(browser, "skipped") == str(missed)
    [(scale, loss)] = asked(
        trace, "SELECT scale, loss FROM steps ORDER BY step DESC LIMIT 1"
    )
    assert fact(browser, "scale") == f"2^{scale.hex().split('p+')[1]}"
    assert fact(browser, "loss") == f"{loss:.4g}"
    bits = sorted(
        b for (b,) in asked(trace, "SELECT headroom FROM steps WHERE applied = 1")
    )
    middle = (bits[len(bits) // 2] + bits[(len(bits) - 1) // 2]) / 2
    assert fact(browser, "headroom") == f"{middle:.1f} bits"


def test_every_skip_is_drawn_and_listed(show, page, trace):
    """As a mark of its verdict's shape, and in words."""
    browser = show(page)
    missed = asked(trace, "SELECT step, verdict FROM steps WHERE applied = 0")
    drawn = {
        (int(step), name.split()[-1])
        for name, steps, _ in browser.execute_script(DRAWN, "skips")
        for step in steps
    }
    assert drawn == set(missed)
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#skips-0 tbody tr')].map(row => "
        "[row.cells[0].dataset.value, row.cells[1].textContent, "
        "row.cells[2].textContent])"
    )
    assert {(int(step), why) for step, why, _ in rows} == set(missed)
    assert {where for _, _, where in rows} == {"head.bias"}


def test_the_drawn_scale_is_the_recorded_one(show, page, trace):
    """Every point of the line is a step of the file, and its ends are there."""
    import math

    browser = show(page)
    rows = dict(asked(trace, "SELECT step, scale FROM steps"))
    [(_, steps, logs)] = browser.execute_script(DRAWN, "scale ")
    assert (steps[0], steps[-1]) == (0, STEPS - 1)
    for step, log2 in zip(steps, logs, strict=True):
        assert log2 == pytest.approx(math.log2(rows[step]))


def test_tables_are_sorted_from_the_keyboard(show, page):
    """Tab to a heading, press Enter, and once more for the other way round."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser = show(page)
    headings = browser.find_elements(By.CSS_SELECTOR, "#layers-0 th button")
    assert [h.text for h in headings][:2] == ["tensor", "elements"]

    def sizes():
        cells = browser.find_elements(By.CSS_SELECTOR, "#layers-0 td:nth-child(2)")
        return [int(cell.get_attribute("data-value")) for cell in cells]

    headings[0].send_keys("")
    headings[0].send_keys(Keys.TAB)
    focused = browser.switch_to.active_element
    assert focused.text == "elements"
    focused.send_keys(Keys.ENTER)
    assert sizes() == [4000, 900, 10]
    focused.send_keys(Keys.SPACE)
    assert sizes() == [10, 900, 4000]
    order = focused.find_element(By.XPATH, "..").get_attribute("aria-sort")
    assert order == "ascending"


def test_the_toggle_changes_page_and_charts(show, page):
    """From light to dark and back, from the keyboard too."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser = show(page)
    look = (
        "for (const m of Bokeh.documents[0].all_models) if (m.type === 'LinearAxis')"
        " return [m.major_label_text_color,"
        " getComputedStyle(document.body).backgroundColor]"
    )
    before = browser.execute_script(look)
    toggle = browser.find_element(By.ID, "theme")
    toggle.send_keys(Keys.ENTER)
    after = browser.execute_script(look)
    assert before[0] != after[0]
    assert before[1] != after[1]
    toggle.click()
    assert browser.execute_script(look) == before


def test_a_drag_zooms_all_charts_and_hover_shows_values(show, page):
    """The range of steps is one for all; a tooltip names the step and the scale."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser = show(page)
    span = (
        "for (const m of Bokeh.documents[0].all_models)"
        " if (m.type === 'Range1d' && m.end > 100) return [m.start, m.end]"
    )
    wide = browser.execute_script(span)
    chart = browser.find_elements(By.CSS_SELECTOR, "#scale .bk-Figure")[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(browser).move_to_element_with_offset(chart, 60, 0).perform()
    WebDriverWait(browser, 10, 0.05).until(
        lambda b: "scale:2^14" in b.execute_script(TIPS).replace(" ", "")
    )
    ActionChains(browser).move_to_element_with_offset(
        chart, -100, 0
    ).click_and_hold().move_by_offset(150, 0).release().perform()
    narrow = browser.execute_script(span)
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 2


def test_several_runs_stand_side_by_side(show, both):
    """One row each in the comparison, one line each in the charts, notes and facts."""
    browser = show(both)
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#compare tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent.trim()))"
    )
    assert [row[0] for row in rows] == ["first", "second"]
    assert rows[1][2] == "0.75"
    assert len(browser.execute_script(DRAWN, "scale ")) == 2
    [(_, steps, values)] = browser.execute_script(DRAWN, "accuracy")
    assert (steps, values) == ([0, 2500], pytest.approx([0.1, 0.9]))
    text = browser.execute_script("return document.body.textContent")
    assert "a shorter one" in text
    assert "Two runs" in text


def test_names_from_a_file_stay_text(show, tmp_path):
    """Markup in labels, tensors and meta is shown, not run."""
    evil = "</script><script>window.owned = 1</script><img src=x onerror=owned=1>"
    from buoy.trace import Counts, Recorder

    with Recorder(tmp_path / "run.buoy", meta={"model": evil, "name": evil}) as run:
        run.step(scale=2.0, applied=False, offenders=[evil], amax=1.0, loss=1.0)
        run.step(scale=2.0, applied=True, amax=1.0, loss=1.0)
        run.histograms(0, 2.0, {evil: Counts(-3, (1,), size=1)})
    runs = [Run(tmp_path / "run.buoy", evil, series={evil: {0: 1.0}}, note=evil)] * 2
    page = buoy.report.write(runs, tmp_path / "page.html", title=evil, intro=evil)
    browser = show(page)
    assert browser.execute_script("return window.owned") is None
    assert complaints(browser) == []
    assert requests(browser) == []


@pytest.mark.slow
def test_a_hundred_thousand_steps_fit_in_three_megabytes(show, tmp_path):
    """Skips all drawn, and the page still opens."""
    trace = record(tmp_path / "long.buoy", 100_000, shots=100)
    page = buoy.report.write([trace], tmp_path / "long.html")
    assert page.stat().st_size < 3_000_000
    browser = show(page)
    assert complaints(browser) == []
    drawn = sum(len(steps) for _, steps, _ in browser.execute_script(DRAWN, "skips"))
    [(missed,)] = asked(trace, "SELECT count(*) FROM steps WHERE applied = 0")
    assert drawn == missed == 102
