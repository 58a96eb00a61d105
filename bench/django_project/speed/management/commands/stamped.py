"""A command whose first line leaves a stamp, with the nominal time if it has one."""

import os
from datetime import datetime

from django.core.management.base import BaseCommand

from speed.stamps import stamp


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("name")

    def handle(self, *args, name, **options):
        scheduled_for = os.environ.get("TASUKI_SCHEDULED_FOR")
        stamp(f"{name}@{datetime.fromisoformat(scheduled_for).timestamp():.0f}" if scheduled_for else name)
