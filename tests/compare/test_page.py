"""The HTML page: what is in it, that it loads nothing, and that names from logs stay text."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from log_files import log, losses, skipped

from mpguard.compare import Comparison, RunLog, compare
from mpguard.compare.page import html, page_data, thinned

NORMS = {step: 1.0 + 1 / step for step in range(1, 1501)}


def report(**arms: RunLog) -> Comparison:
    base = log(losses(seed=0), "base", grad_norm=NORMS, loss_scale=dict.fromkeys(NORMS, 1024.0))
    return compare({**{name: [run] for name, run in arms.items()}, "base": [base]}, "base")


def data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    result: dict[str, Any] = json.loads(found[1])
    return result


def test_the_page_has_verdicts_and_data() -> None:
    nan = {step: math.nan if step > 1400 else value for step, value in losses(seed=2).items()}
    page = html(report(fine=log(losses(seed=1), events=(skipped(7),), ms={1: 20.0}, memory=3 << 30), lost=log(nan)))
    for text in ("same", "diverged", "loss nan at step 1401", "3 GiB", "1 skipped step", "<noscript>", "±0.5 %"):
        assert text in page, text
    assert "{{" not in page.replace("${", "")
    found = data(page)
    assert {name: len(series) for name, series in found["plots"].items()} == {
        "loss": 3, "difference": 2, "grad_norm": 1, "loss_scale": 1
    }  # fmt: skip
    assert found["events"] == [{"run": "fine", "color": 1, "step": 7, "kind": "skipped step", "text": ""}]
    assert found["plots"]["loss"][2]["values"][-1] == "nan" and found["from"] == 152


def test_columns_without_a_value_are_left_out() -> None:
    page = html(report(run=log(losses(seed=1), memory=3 << 30)))
    header = page.split("<thead>")[1].split("</thead>")[0]
    assert "Last loss" in header and "Memory" in header and "Events" not in header and "ms per step" not in header


def test_the_page_loads_nothing() -> None:
    page = html(report(fine=log(losses(seed=1))))
    assert "default-src 'none'" in page
    shown = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\((?!#)|<link|<img|<iframe|\bsrc=|fetch\(|XMLHttpRequest", shown)


def test_names_from_logs_stay_text() -> None:
    evil = "</script><script>alert(1)</script>"
    run = log(losses(seed=1), evil, events=(skipped(7),), notes=(f"note {evil}",))
    page = html(compare({evil: [run], "base": [log(losses(seed=0), "base")]}, "base"))
    assert "<script>alert" not in page and page.count("</script>") == 2
    assert data(page)["plots"]["loss"][1]["label"] == evil


def test_long_series_are_thinned_and_keep_what_stands_out() -> None:
    points = [(step, math.sin(step)) for step in range(50_000)]
    points[25_000], points[30_001] = (25_000, 99.0), (30_001, math.nan)
    kept = thinned(points)
    assert len(kept) < 5000 and (25_000, 99.0) in kept and any(step == 30_001 for step, _ in kept)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)
    assert thinned(points[:100]) == points[:100]


def test_arms_of_several_runs_are_drawn_by_run() -> None:
    arms = {name: [log(losses(600, order=10 * i + j, seed=10 * i + j), f"{name}{j}") for j in range(3)]
            for i, name in enumerate(("runs", "base"))}  # fmt: skip
    found = page_data(compare(arms, "base"))["plots"]
    assert [series["label"] for series in found["loss"]] == [
        "base: base0", "base: base1", "base: base2", "runs: runs0", "runs: runs1", "runs: runs2"
    ]  # fmt: skip
    assert len(found["difference"]) == 1


@pytest.fixture(scope="module")
def browser() -> Any:
    """A real headless Chromium: that of the PATH."""
    import shutil

    playwright = pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, path: Path, **options: Any) -> tuple[Any, list[str]]:
    """Return the opened page, and a list of the errors and requests of its script."""
    problems: list[str] = []
    page = browser.new_context(viewport={"width": 1200, "height": 1600}, **options).new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.on("request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return page, problems


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = log(losses(seed=1), "run", grad_norm=NORMS, loss_scale=dict.fromkeys(NORMS, 512.0), events=(skipped(700),))
    nan = {step: math.nan if step > 1400 else value for step, value in losses(seed=2).items()}
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(report(run=run, lost=log(nan))), "utf-8")
    return path


def test_the_plots_in_a_browser(browser: Any, page_file: Path) -> None:
    page, problems = opened(browser, page_file)
    assert page.locator(".plot > svg").count() == 4
    assert "Step 1500" in page.inner_text("#at")
    page.focus("#cursor")  # by keyboard
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.inner_text("#at").startswith("Step 3.")
    page.get_by_role("button", name="Move the cursor to step 700").click()
    assert page.inner_text("#at").startswith("Step 700.")
    page.get_by_role("button", name="Zoom in").click()
    low, high = int(page.input_value("#low")), int(page.input_value("#high"))
    assert 300 < low < 700 < high < 1200
    page.evaluate("scrollTo(0, 0)")
    box = page.locator(".plot > svg").first.bounding_box()
    page.mouse.move(box["x"] + 400, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 60)
    page.mouse.up()
    assert low < int(page.input_value("#low")) < int(page.input_value("#high")) < high
    page.fill("#low", "10")
    page.fill("#high", "20")
    page.press("#high", "Tab")
    assert "10" in page.locator(".axis text").all_text_contents()
    page.get_by_role("button", name="All steps").click()
    assert page.input_value("#high") == "1500"
    button = page.get_by_role("button", name="run", exact=True)
    before = page.locator("figure").first.locator("path.mean").count()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert page.locator("figure").first.locator("path.mean").count() == before - 1
    assert problems == []


def test_the_page_in_the_dark_without_script_and_on_paper(browser: Any, page_file: Path) -> None:
    def paper(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page, problems = opened(browser, page_file, color_scheme="dark")
    assert paper(page) == "rgb(13, 17, 23)"
    page.get_by_role("button", name="Theme: automatic").click()
    assert paper(page) == "rgb(255, 255, 255)" and problems == []
    page.get_by_role("button", name="Theme: light").click()
    assert paper(page) == "rgb(13, 17, 23)"
    page.emulate_media(media="print")
    assert paper(page) == "rgb(255, 255, 255)" and not page.locator("#cursor").is_visible()
    assert page.pdf()[:4] == b"%PDF"
    page, _ = opened(browser, page_file, java_script_enabled=False)
    assert "diverged" in page.inner_text("table") and not page.locator("#controls").is_visible()


def test_the_text_of_plots_is_readable_on_a_small_screen(browser: Any, page_file: Path) -> None:
    page, problems = opened(browser, page_file)
    for width in (380, 800, 1200):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(50)
        boxes = [text.bounding_box() for text in page.locator(".plot > svg .axis text").all()[:6]]
        assert all(8 <= box["height"] <= 24 for box in boxes), (width, boxes)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not problems


def test_a_screen_reader_gets_names_and_values(browser: Any, page_file: Path) -> None:
    page, _ = opened(browser, page_file)
    images = page.get_by_role("img").all()
    assert len(images) == 4 and all("by step, from 1 to 1500" in image.get_attribute("aria-label") for image in images)
    assert "100 values that are not finite" in images[0].get_attribute("aria-label")
    unnamed = "[...document.querySelectorAll('button, input')].filter((e) => !(e.labels?.length || e.textContent))"
    assert page.evaluate(f"{unnamed}.length") == 0
    page.locator("figure").first.get_by_text("Values as a table").click()
    assert page.locator("figure").first.locator("tbody tr").count() == 20
