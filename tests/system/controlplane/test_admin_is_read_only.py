"""No page of the admin writes state past the services. Operators and groups are the two exceptions."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group
from django.db.models import Model
from django.test import Client, RequestFactory
from django.urls import reverse

from core.admin_pages import CreatingAdmin, ShowingAdmin
from core.models import User
from gateway.models import ApiKey
from gateway.routing import Target
from gateway.services import allow_model, change_response_policy, create_alias
from gateway.services.responses import keep_response
from governance.services import create_admin_token
from governance.services.webhooks import add_webhook
from tests.system.gateway_admin.factories import ACTOR, make_gateway, make_key, make_record
from tests.system.nodes.factories import make_node

WRITTEN_BY_THE_ADMIN = {User, Group}
STATE = sorted((model for model in admin.site._registry if model not in WRITTEN_BY_THE_ADMIN), key=lambda model: model.__name__)


def keep_answer(key: ApiKey) -> None:
    """Keep an answer for the tenant of a key."""
    change_response_policy(name=key.tenant.name, stores_responses=True, responses_kept_days=1, actor=ACTOR)
    body = b'{"id": "resp_1", "output": []}'
    keep_response(tenant=key.tenant.name, key_id=key.pk, kept_days=1, model="tiny", previous_id="", input_items=[], body=body)


def name_of(model: type[Model]) -> str:
    return f"{model._meta.app_label}_{model._meta.model_name}"


def test_every_table_of_state_is_in_this_test() -> None:
    assert {model.__name__ for model in STATE} >= {"Node", "ApiKey", "Tenant", "Model", "RequestRecord", "AuditEvent"}


@pytest.mark.parametrize("model", STATE, ids=name_of)
def test_no_form_of_a_model_is_offered_even_to_a_superuser(model: type[Model]) -> None:
    page = admin.site._registry[model]
    request = RequestFactory().get("/")
    request.user = User(username="ada", is_superuser=True, is_staff=True, is_active=True)
    request.session = {"muster_assurance": "passkey"}  # type: ignore[assignment]  # all that the pages read of one

    assert isinstance(page, ShowingAdmin)
    assert not page.has_change_permission(request)
    assert not page.has_delete_permission(request)
    assert page.get_actions(request) == {}
    assert not page.list_editable
    assert not page.inlines
    assert not any((page.actions_row, page.actions_detail, page.actions_list, page.actions_submit_line))
    if page.has_add_permission(request):
        assert isinstance(page, CreatingAdmin)
        assert type(page).add_view is CreatingAdmin.add_view


@pytest.mark.django_db
@pytest.mark.parametrize("model", STATE, ids=name_of)
def test_posting_to_a_row_or_to_its_deletion_is_refused(model: type[Model]) -> None:
    key, _ = make_key()
    keep_answer(key)
    make_record()
    make_gateway()
    make_node()
    allow_model(name="tiny", actor=ACTOR)
    create_alias(name="small", targets=[Target("tiny")], actor=ACTOR)
    create_admin_token(name="tests", actor=ACTOR)
    add_webhook(name="tests", url="https://chat.example.com/", actor=ACTOR)
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    row = model._default_manager.first()
    assert row is not None, f"make a row of {model.__name__} above"
    before = model._default_manager.filter(pk=row.pk).values().get()

    for page in ("change", "delete"):
        answer = client.post(reverse(f"admin:{name_of(model)}_{page}", args=[row.pk]), {"name": "changed", "post": "yes"})
        assert answer.status_code == 403
    answer = client.post(
        reverse(f"admin:{name_of(model)}_changelist"),
        {"action": "delete_selected", "_selected_action": str(row.pk), "post": "yes", "_save": "Save"},
    )

    assert answer.status_code in {200, 302, 403}
    assert model._default_manager.filter(pk=row.pk).values().get() == before
