"""Addresses of a server's own Django application: the screens below /ops/, as in a project."""

from __future__ import annotations

from django.urls import include, path

handler404 = "tasuki.django.ops.screens.not_found"
urlpatterns = [path("ops/", include("tasuki.django.ops.urls"))]
