"""Routes of users: who may sign in to the dashboard. Each may change only other accounts, and the last admin stays one."""

from __future__ import annotations

from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access import users
from controlplane.access.roles import Role
from controlplane.api import requests, resources
from controlplane.api.view import IDEMPOTENCY_KEY, ApiView
from controlplane.fleet.errors import NotFound


def _row(name: str) -> users.UserRow:
    row = next((row for row in users.list_users() if row.user.get_username() == name), None)
    if row is None:
        raise NotFound(f"there is no user {name}")
    return row


class Users(ApiView):
    @extend_schema(operation_id="listUsers", responses=resources.UserList)
    def get(self, request: Request) -> Response:
        return Response(resources.UserList({"items": users.list_users()}).data)

    @extend_schema(
        operation_id="createUser",
        parameters=[IDEMPOTENCY_KEY],
        request=requests.NewUser,
        responses={201: resources.NewUserResource},
    )
    def post(self, request: Request) -> Response:
        """The answer alone holds the one-time password; another must be chosen at the first sign-in."""
        wanted = self.checked(requests.NewUser)
        role = Role[wanted["role"].upper()]
        user, text = users.create_user(actor=self.actor, name=wanted["name"], role=role, token=self.idempotency_key())
        return Response({**resources.UserResource(_row(user.get_username())).data, "password": text}, status=201)


class UserDetail(ApiView):
    @extend_schema(operation_id="changeUser", request=requests.UserChanges, responses=resources.UserResource)
    def patch(self, request: Request, name: str) -> Response:
        changes = self.checked(requests.UserChanges)
        role = Role[changes["role"].upper()] if "role" in changes else None
        users.change_user(actor=self.actor, name=name, role=role, active=changes.get("active"))
        return Response(resources.UserResource(_row(name)).data)


class UserPassword(ApiView):
    @extend_schema(
        operation_id="resetPassword",
        parameters=[IDEMPOTENCY_KEY],
        request=None,
        responses=resources.NewUserResource,
    )
    def post(self, request: Request, name: str) -> Response:
        """A new one-time password, in this answer alone; the user's sessions end."""
        text = users.reset_password(actor=self.actor, name=name, token=self.idempotency_key())
        return Response({**resources.UserResource(_row(name)).data, "password": text})


routes = [
    path("users", Users.as_view()),
    path("users/<str:name>", UserDetail.as_view()),
    path("users/<str:name>/password", UserPassword.as_view()),
]
