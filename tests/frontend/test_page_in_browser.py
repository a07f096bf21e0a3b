"""The page in a headless Chromium: a conversation, what is shown live of its request, the pools, and a phone's width.

    TANDEM_SCREENSHOTS=FOLDER python -m pytest tests/frontend/test_page_in_browser.py
keeps the pictures.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from frontend.harmony.format import HarmonyFormat
from tests.frontend.support.fake_router import Script
from tests.frontend.support.stack import running_stack

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
async_api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
expect = async_api.expect
WITHIN_MS = 60_000
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]
TEXT = (
    "<|channel|>analysis<|message|>The user adds numbers. <b>Two</b> and two.<|end|><|start|>assistant<|channel|>final<|message|>"
    + "Two and two make four & <script>document.title = 'pwned'</script> nothing else. " * 6
    + "<|return|>"
)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("TANDEM_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
async def test_chat_route_timeline_and_pools(harmony: HarmonyFormat, pictures: Path, width: int):
    ids = harmony.vocabulary.harmony.encode(TEXT, allowed_special="all")
    script = Script(ids, gap_s=0.005, waits_after=60)
    async with running_stack(harmony, lambda request, index: script) as stack, async_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": width, "height": 844})
        page.set_default_timeout(WITHIN_MS)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        await page.goto(stack.url)
        await expect(page.locator("#model")).to_have_text("gpt-oss-20b", timeout=WITHIN_MS)
        await page.fill("#text", "What is 2 + 2?")
        await page.click("#send")
        await page.wait_for_selector("#route tbody tr.chosen")
        await expect(page.locator(".message .content")).to_contain_text("make four", timeout=WITHIN_MS)
        await page.screenshot(path=pictures / f"running-{width}.png")
        assert not await page.is_hidden("#stop"), "the route and the cost are there while it runs"
        assert await page.is_hidden("#send")
        await expect(page.locator("#cost")).to_contain_text("$", timeout=WITHIN_MS)
        script.goes_on.set()
        await page.wait_for_selector("#stop", state="hidden")
        await page.screenshot(path=pictures / f"done-{width}.png", full_page=True)
        content = await page.text_content(".message.assistant .content")
        assert content == "Two and two make four & <script>document.title = 'pwned'</script> nothing else. " * 6
        assert await page.text_content(".message .reasoning") == "The user adds numbers. <b>Two</b> and two."
        assert await page.title() == "Tandem"
        rows = await page.eval_on_selector_all("#route tbody tr:not(.why)", "rows => rows.map(row => row.innerText)")
        assert len(rows) == 2
        assert "prefill-tp1" in rows[1]
        assert await page.text_content("#route tr.why") == "costs more"
        assert await page.eval_on_selector_all(".timeline .bar", "bars => bars.length") == 2
        fits = "(box => box.scrollWidth <= box.clientWidth + 1)(document.querySelector('.scroll'))"
        assert await page.evaluate(fits), "the whole route is seen"
        tops = await page.eval_on_selector_all("#effort, #send", "parts => parts.map(part => part.getBoundingClientRect().top)")
        assert abs(tops[0] - tops[1]) < 20, "one row of controls"
        assert await page.text_content("#tokens") == str(len(ids))
        assert float(await page.text_content("#speed")) > 1
        await page.click("#tab-pools")
        await page.wait_for_selector(".card .group")
        await page.screenshot(path=pictures / f"pools-{width}.png", full_page=True)
        cards = await page.eval_on_selector_all(".card", "cards => cards.map(card => card.innerText)")
        assert len(cards) == 2
        assert all("1 replica of" in card and "/h" in card and "KV" in card for card in cards)
        assert "queue: 2 requests, 640 tokens" in cards[0]
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out sideways"
        assert not errors
        await browser.close()


async def test_stop_frees_the_request_and_errors_are_shown(harmony: HarmonyFormat):
    ids = harmony.vocabulary.harmony.encode("<|channel|>final<|message|>" + " so" * 2000, allowed_special="all")
    async with running_stack(harmony, lambda request, index: Script(ids, gap_s=0.02)) as stack, async_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        page.set_default_timeout(WITHIN_MS)
        await page.goto(stack.url)
        await expect(page.locator("#model")).to_have_text("gpt-oss-20b", timeout=WITHIN_MS)
        await page.fill("#text", "Go on")
        await page.click("#send")
        await page.wait_for_selector(".message .content")
        await page.click("#stop")
        await stack.until_idle(within_s=20)
        stack.service.drain()
        await page.fill("#text", "More")
        await page.click("#send")
        await page.wait_for_selector(".message.error")
        assert "shutting down" in await page.text_content(".message.error")
        await browser.close()
