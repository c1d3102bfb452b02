"""Swagger UI at `/docs`: its users see every route, and it is drawn with what the service itself sends."""

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.timeout(240)


def test_docs_show_every_route_and_load_nothing_from_elsewhere(
    service: Any, open_page: Callable[..., Page]
) -> None:
    page = open_page(service, "docs")

    described = service.client.get("/openapi.json").json()
    operations = [
        (method.upper(), path)
        for path, methods in described["paths"].items()
        for method in methods
        if method in {"get", "post"}
    ]
    expect(page.locator(".opblock")).to_have_count(len(operations), timeout=60_000)
    shown = {
        (
            block.locator(".opblock-summary-method").inner_text(),
            block.locator(".opblock-summary-path").get_attribute("data-path"),
        )
        for block in page.locator(".opblock").all()
    }
    assert shown == set(operations)


def test_a_request_can_be_tried_from_docs(service: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(service, "docs")

    block = page.locator(".opblock", has=page.locator('[data-path="/v2/health/live"]'))
    block.locator(".opblock-summary").click()
    block.locator("button.try-out__btn").click()
    block.locator("button.execute").click()

    answer = block.locator(".live-responses-table .response")
    expect(answer.locator(".response-col_status").first).to_contain_text("200", timeout=60_000)
    expect(answer).to_contain_text('"live": true')
