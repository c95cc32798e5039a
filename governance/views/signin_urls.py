"""Addresses of the pages on which people sign in and keep their keys. Included under ``/sign-in/`` as ``signin``."""

from __future__ import annotations

from django.urls import path

from governance.views import keys, signin

app_name = "signin"
urlpatterns = [
    path("", signin.show_login, name="login"),
    path("passkey/options", signin.send_sign_in_options, name="passkey-options"),
    path("passkey", signin.receive_passkey, name="passkey"),
    path("out", signin.sign_out, name="logout"),
    path("invitation/<str:token>", signin.show_invitation, name="invitation"),
    path("invitation/<str:token>/options", signin.send_invitation_options, name="invitation-options"),
    path("invitation/<str:token>/passkey", signin.receive_invitation, name="invitation-passkey"),
    path("keys", keys.show_keys, name="keys"),
    path("keys/passkey/options", keys.send_key_options, name="key-options"),
    path("keys/passkey", keys.receive_key, name="key-passkey"),
    path("keys/<int:key_id>/remove", keys.remove_key, name="remove-key"),
    path("totp", keys.show_app, name="totp"),
    path("totp/remove", keys.forget_app, name="remove-totp"),
    path("sessions/end", keys.end_other_sessions, name="end-sessions"),
]
