"""What was sent twice is done once: by a token, for pages and REST alike."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.access import services
from controlplane.access.models import ApiKey, AuditEntry, Submission
from controlplane.access.once import KEPT, SHOWN_AGAIN
from controlplane.access.roles import SYSTEM, Actor, Role
from controlplane.deployments import services as deployments
from controlplane.deployments.models import Deployment
from controlplane.fleet.errors import Conflict, InvalidInput
from controlplane.nodes import services as nodes
from controlplane.nodes.models import JoinToken
from tests.controlplane.core.scripted import document

pytestmark = pytest.mark.django_db
ADA, BEN = Actor("ada", Role.ADMIN), Actor("ben", Role.ADMIN)


def new_key(actor: Actor = ADA, *, token: str = "t-1", name: str = "app") -> tuple[ApiKey, str]:
    return services.create_key(actor=actor, name=name, scope="inference", token=token)


def later(by: timedelta) -> None:
    Submission.objects.update(at=timezone.now() - by)


def test_a_key_that_is_sent_twice_is_made_once_and_shown_again() -> None:
    first, text = new_key()
    assert new_key() == (first, text)
    assert services.authenticate_key(text) == first
    assert ApiKey.objects.count() == AuditEntry.objects.count() == 1
    assert text.split("-", 2)[2] not in str(list(Submission.objects.values()))


def test_another_token_another_person_and_no_token_each_make_another_secret() -> None:
    made = [new_key(), new_key(token="t-2"), new_key(BEN), new_key(token=""), new_key(token="")]
    assert len({text for _, text in made}) == len({key.pk for key, _ in made}) == ApiKey.objects.count() == 5


def test_other_contents_under_the_same_token_are_a_conflict() -> None:
    key, _ = new_key()
    with pytest.raises(Conflict, match=f"sent before with other contents, at .* and made {key.pk}"):
        new_key(name="other")
    assert ApiKey.objects.count() == 1


def test_what_failed_may_be_sent_again_with_its_token() -> None:
    with pytest.raises(InvalidInput):
        new_key(name="")
    assert new_key()[0].name == "app"


def test_a_secret_is_shown_again_for_a_while_only() -> None:
    new_key()
    later(SHOWN_AGAIN + timedelta(seconds=1))
    with pytest.raises(Conflict, match="shown then and cannot be shown again"):
        new_key()
    assert ApiKey.objects.count() == 1
    later(KEPT + timedelta(seconds=1))
    assert new_key()[0].pk in set(ApiKey.objects.values_list("pk", flat=True))
    assert ApiKey.objects.count() == 2


def test_a_rotation_that_is_sent_twice_happens_once() -> None:
    key, old = services.create_key(actor=SYSTEM, name="app", scope="inference")
    rotated = [services.rotate_key(actor=ADA, key_id=key.pk, overlap_seconds=0, token="r")[1] for _ in range(2)]
    assert rotated[0] == rotated[1] != old
    assert services.authenticate_key(rotated[0]) == key
    services.rotate_key(actor=ADA, key_id=key.pk, overlap_seconds=0, token="r-2")
    with pytest.raises(Conflict, match="not its secret any more"):
        services.rotate_key(actor=ADA, key_id=key.pk, overlap_seconds=0, token="r")


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: deployments.create(actor=ADA, document=document(), token="t").name, Deployment.objects.count),
        (lambda: nodes.create_join_token(actor=ADA, hours=2, once="t"), JoinToken.objects.count),
    ],
)
def test_deployments_and_join_tokens_too(make: Callable[[], str], count: Callable[[], int]) -> None:
    assert make() == make()
    assert count() == 1


@pytest.mark.parametrize("token", ["x" * 201, "é", "a\nb"])
def test_a_token_that_is_none_is_refused(token: str) -> None:
    with pytest.raises(InvalidInput, match="Idempotency-Key: send 1 to 200"):
        new_key(token=token)
