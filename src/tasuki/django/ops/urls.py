"""Addresses of the operations screens."""

from __future__ import annotations

from django.urls import path

from tasuki.django.ops import project_views, screens, server_views, views

app_name = "tasuki_ops"
urlpatterns = [
    path("", views.overview, name="overview"),
    path("jobs/", views.jobs, name="jobs"),
    path("jobs/<str:job_id>/", views.job, name="job"),
    path("jobs/<str:job_id>/result/", views.result, name="result"),
    path("jobs/<str:job_id>/log/<str:stream>/", views.log, name="log"),
    path("run/", views.run, name="run"),
    path("dead/", views.dead, name="dead"),
    path("subjects/", views.subjects, name="subjects"),
    path("workers/", views.workers, name="workers"),
    path("agents/", views.agents, name="agents"),
    path("definitions/", project_views.definitions, name="definitions"),
    path("definitions/new/", project_views.definition, name="new_definition"),
    path("definitions/<int:pk>/", project_views.definition, name="definition"),
    path("events/", project_views.events, name="events"),
    path("tokens/", server_views.tokens, name="tokens"),
    path("caches/", server_views.caches, name="caches"),
    path("settings/", project_views.settings, name="settings"),
    path("audit/", views.audit, name="audit"),
    path("login/", screens.login, name="login"),
    path("logout/", screens.logout, name="logout"),
    path("language/", screens.language, name="language"),
    path("assets/<str:name>", screens.asset, name="asset"),
]
