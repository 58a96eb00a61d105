"""Addresses of a server's own Django application: the screens below /ops/, as in a project."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [path("ops/", include("tasuki.django.ops.urls"))]
