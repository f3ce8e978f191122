"""Train a small network in real FP16, report on it, and take the picture of that page.

    python tools/pictures/report.py [--steps N]

It writes docs/_static/report.png, and needs Chromium and its driver (`make browser`).
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch

import buoy.report
from buoy.torch import GradScaler

PICTURES = Path(__file__).parents[2] / "docs/_static"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--hide-scrollbars",
)  # fmt: skip


def network() -> torch.nn.Module:
    """Make a network with a few layers to name."""
    width = 96
    return torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 1),
    )


def train(path: Path, steps: int) -> None:
    """Fit a product of sines, in FP16, with torch's rule from far too high a scale."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = GradScaler(
        "cpu", init_scale=2.0**26, growth_interval=300, model=model, trace=path
    )
    for _ in range(steps):
        x = torch.rand(64, 8) * 2.0 - 1.0
        y = torch.sin(3.0 * x[:, :1]) * torch.sin(2.0 * x[:, 1:2]) * 0.1
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    if scaler.trace is not None:
        scaler.trace.close()


def picture(page: Path, out: Path) -> None:
    """Open the page and save what the first screens show."""
    from selenium import webdriver  # noqa: PLC0415
    from selenium.webdriver.chrome.service import Service  # noqa: PLC0415
    from selenium.webdriver.support.ui import WebDriverWait  # noqa: PLC0415

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        screen = {
            "width": 1080,
            "height": 2440,
            "deviceScaleFactor": 0.75,
            "mobile": False,
        }
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        driver.get(page.as_uri())
        WebDriverWait(driver, 60).until(
            lambda d: d.execute_script("return document.documentElement.dataset.ready")
        )
        time.sleep(0.5)  # the last chart is drawn a frame after it is ready
        driver.save_screenshot(str(out))
        driver.quit()


def main() -> None:
    """Train, report, photograph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.buoy"
        train(trace, steps)
        title = "A small network in FP16"
        page = buoy.report.write([trace], Path(folder) / "report.html", title=title)
        picture(page, PICTURES / "report.png")


if __name__ == "__main__":
    main()
