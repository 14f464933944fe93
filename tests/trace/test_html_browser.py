"""The page in a real browser: no error, no request, no sideways scroll, and all of it by keyboard."""

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinyllm import LLM, SamplingParams
from tinyllm.trace.decisions import request_label
from tinyllm.trace.html import render_fragment, render_page
from tinyllm.trace.record import PromptRecord, RunRecord
from tinyllm.trace.session import trace_steps

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

pytestmark = pytest.mark.long

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
           "--disable-sync", "--no-first-run", "--disable-dev-shm-usage")  # fmt: skip
WINDOWS = {"phone": (360, 740), "desktop": (1280, 900)}
WIDTHS_OF_BOXES = (
    "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && e.getClientRects().length"
    " && e.getBoundingClientRect().right > innerWidth + 1 && !e.matches('.skip')).map(e => e.outerHTML.slice(0, 90))"
)


def record_run(smollm2) -> RunRecord:
    prompts = ["The capital of France is", "Water boils at 100 degrees </script><svg onload=alert(1)>"]
    llm = LLM(smollm2, block_size=4, num_blocks=17, max_model_len=40)
    steps = tuple(trace_steps(llm, llm.make_requests(prompts, SamplingParams(max_tokens=2, ignore_eos=True))))
    dims = {**llm.loaded.config.dims(), **llm.engine.cache_config.dims()}
    texts = [[(llm.tokenizer.token_text(i),) for i in llm.tokenizer.encode(prompt)] for prompt in prompts]
    records = tuple(
        PromptRecord(request_label(i), *pair) for i, pair in enumerate(zip(prompts, map(tuple, texts), strict=True))
    )
    kv_cache = llm.engine.kv_cache
    return RunRecord(
        "SmolLM2", "float32", "reference", tuple(kv_cache.kv.shape), kv_cache.num_bytes, dims, records, steps, ()
    )


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory) -> Path:
    """A page with a roof, and the fragment in a page of its own."""
    run, folder = record_run(smollm2), tmp_path_factory.mktemp("pages")
    (folder / "page.html").write_text(render_page(run, 10.0), encoding="utf-8")
    head = "<!DOCTYPE html><html lang=en><meta charset=utf-8><meta name=viewport content=width=device-width><title>cell</title>"
    (folder / "fragment.html").write_text(head + render_fragment(run), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator:
    """Headless Chromium with an empty profile; selenium gets the driver's path, so that it fetches none."""
    if BROWSER is None or DRIVER is None:
        pytest.skip("no Chromium with its chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def show(browser, path: Path, window: str = "desktop", scheme: str = "light") -> None:
    width, height = WINDOWS[window]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": window == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(path.as_uri())


def press(browser, *keys: str) -> None:
    for key in keys:
        webdriver.ActionChains(browser).send_keys(key).perform()


def open_all(browser) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")


@pytest.mark.parametrize("name", ["page.html", "fragment.html"])
def test_nothing_is_fetched_and_nothing_fails(browser, folder, name):
    for log in ("browser", "performance"):
        browser.get_log(log)  # empties it
    show(browser, folder / name)
    open_all(browser)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert asked == {(folder / name).as_uri()}
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.scripts.length") == 0


@pytest.mark.parametrize("name", ["page.html", "fragment.html"])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_page_never_scrolls_sideways(browser, folder, name, window):
    show(browser, folder / name, window)
    for _ in range(2):
        assert browser.execute_script("return document.documentElement.scrollWidth") <= WINDOWS[window][0]
        assert browser.execute_script(WIDTHS_OF_BOXES) == []
        open_all(browser)


def test_the_keyboard_opens_a_step(browser, folder):
    show(browser, folder / "page.html")
    keys = webdriver.Keys
    press(browser, keys.TAB)
    link = browser.switch_to.active_element
    assert link.text == "Skip to the steps" and link.rect["x"] >= 0
    press(browser, keys.ENTER)
    assert browser.current_url.endswith("#steps")
    steps = browser.find_elements("css selector", "details.step")
    assert [step.get_attribute("open") for step in steps] == ["true", None]
    reached = []
    for _ in range(90):
        press(browser, keys.TAB)
        focused = browser.switch_to.active_element
        reached.append(focused.tag_name)
        if focused == steps[1].find_element("css selector", "summary"):
            break
    else:
        pytest.fail(f"the second step is not within reach: {reached}")
    outline = focused.value_of_css_property("outline-style"), focused.value_of_css_property("outline-width")
    assert outline == ("solid", "3px")
    press(browser, keys.ENTER)
    assert steps[1].get_attribute("open") == "true"
    press(browser, keys.SPACE)
    assert steps[1].get_attribute("open") is None


def test_a_screen_reader_finds_names_for_all_pictures(browser, folder):
    show(browser, folder / "page.html")
    open_all(browser)
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {}
    for node in nodes:
        roles.setdefault(node.get("role", {}).get("value"), []).append(node.get("name", {}).get("value", ""))
    pictures = browser.execute_script("return document.querySelectorAll('svg').length")
    named = [name for role in ("image", "img", "graphics-document") for name in roles.get(role, [])]
    assert len(named) == pictures and all(named)
    assert {"main", "navigation", "banner", "contentinfo"} <= roles.keys()
    assert len(roles["rowheader"]) > 100 and all(roles["rowheader"])


LYING_TEXTS = (
    "return [...document.querySelectorAll('svg')].flatMap(svg => { const texts = [...svg.querySelectorAll('text')];"
    " const boxes = texts.map(e => e.getBoundingClientRect()); const found = [];"
    " boxes.forEach((a, i) => boxes.forEach((b, j) => {"
    " const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);"
    " const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);"
    " if (i < j && wide > 1 && high > 3) found.push([svg.querySelector('title').textContent, texts[i].textContent,"
    " texts[j].textContent]) })); return found })"
)
CUT_TEXTS = (
    "return [...document.querySelectorAll('svg text')].filter(e => { const a = e.getBoundingClientRect(),"
    " b = e.closest('svg').getBoundingClientRect(); return a.left < b.left - 1 || a.right > b.right + 1"
    " || a.top < b.top - 2 || a.bottom > b.bottom + 2 }).map(e => e.textContent)"
)


@pytest.mark.parametrize("name", ["page.html", "fragment.html"])
def test_no_text_of_a_picture_lies_on_another_or_is_cut(browser, folder, name):
    show(browser, folder / name)
    open_all(browser)
    assert browser.execute_script("return document.querySelectorAll('svg text').length") > 300
    assert browser.execute_script(LYING_TEXTS) == []
    assert browser.execute_script(CUT_TEXTS) == []


def test_on_a_phone_the_stages_need_no_sideways_scroll(browser, folder):
    show(browser, folder / "page.html", "phone")
    open_all(browser)
    widths = browser.execute_script(
        "return [...document.querySelectorAll('table.rows')].map(e => e.parentNode)"
        ".map(e => [e.scrollWidth, e.clientWidth])"
    )
    assert len(widths) == 8 and all(inside <= room for inside, room in widths)


def luminance(colour: str) -> float:
    numbers = [int(number) / 255 for number in colour[colour.index("(") + 1 :].rstrip(")").split(",")[:3]]
    linear = [n / 12.92 if n <= 0.04045 else ((n + 0.055) / 1.055) ** 2.4 for n in numbers]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", ["page.html", "fragment.html"])
def test_both_schemes_are_legible(browser, folder, name):
    grounds = []
    for scheme in ("light", "dark"):
        show(browser, folder / name, scheme=scheme)
        root = browser.find_element("css selector", ".tinyllm")
        ground = root.value_of_css_property("background-color")
        grounds.append(luminance(ground))
        assert contrast(root.value_of_css_property("color"), ground) > 12
        for selector in (".costs", "figcaption", "summary", "td"):
            element = browser.find_element("css selector", f".tinyllm {selector}")
            assert contrast(element.value_of_css_property("color"), ground) > 4.5, (scheme, selector)
        for selector in ("svg .name", "svg .small:not(.on)", "svg .quiet"):
            element = browser.find_element("css selector", f".tinyllm {selector}")
            assert contrast(element.value_of_css_property("fill"), ground) > 4.5, (scheme, selector)
        cells = browser.execute_script(
            "return [...document.querySelectorAll('svg .cell')].map(cell => {"
            " const text = [...cell.closest('g[class]').querySelectorAll('.on, .token')].pop();"
            " return text && [getComputedStyle(cell).fill, getComputedStyle(text).fill] })"
        )
        pairs = {tuple(pair) for pair in cells if pair}
        assert len(pairs) > 1 and all(contrast(*pair) > 4.5 for pair in pairs)
    assert grounds[0] > 0.9 and grounds[1] < 0.02


def test_print_opens_the_steps(browser, folder):
    show(browser, folder / "page.html")
    closed = browser.find_elements("css selector", "details.step:not([open])")
    assert closed and all(step.rect["height"] < 80 for step in closed)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert all(step.rect["height"] > 1000 for step in closed)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_screenshots_differ_by_window_and_scheme(browser, folder, tmp_path):
    """They are for looking at: TINYLLM_SCREENSHOTS names a folder that keeps them."""
    pictures = Path(os.environ.get("TINYLLM_SCREENSHOTS", tmp_path))
    seen = set()
    for name in ("page", "fragment"):
        for window in WINDOWS:
            for scheme in ("light", "dark"):
                show(browser, folder / f"{name}.html", window, scheme)
                image = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})["data"]
                seen.add(image)
                (pictures / f"{name}-{window}-{scheme}.png").write_bytes(base64.b64decode(image))
    assert len(seen) == 2 * len(WINDOWS) * 2 and all(len(image) > 50_000 for image in seen), "none is blank"
