"""Addresses of the operations screens."""

from __future__ import annotations

from django.urls import path

from tasuki.django.ops import screens, views

app_name = "tasuki_ops"
urlpatterns = [
    path("", views.overview, name="overview"),
    path("jobs/", views.jobs, name="jobs"),
    path("jobs/<str:job_id>/", views.job, name="job"),
    path("jobs/<str:job_id>/log/<str:stream>/", views.log, name="log"),
    path("workers/", views.workers, name="workers"),
    path("definitions/", views.definitions, name="definitions"),
    path("definitions/new/", views.definition, name="new_definition"),
    path("definitions/<int:pk>/", views.definition, name="definition"),
    path("events/", views.events, name="events"),
    path("settings/", views.settings, name="settings"),
    path("audit/", views.audit, name="audit"),
    path("login/", screens.login, name="login"),
    path("logout/", screens.logout, name="logout"),
    path("assets/<str:name>", screens.asset, name="asset"),
]
