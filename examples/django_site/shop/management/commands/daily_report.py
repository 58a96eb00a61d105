"""A command that can be run again: the same day gives the same report, written once."""

import os

from django.core.management.base import BaseCommand
from django.db.models import Sum

from shop.models import Order


class Command(BaseCommand):
    help = "Print the number of orders and their total."

    def add_arguments(self, parser):
        parser.add_argument("--minimum", type=int, default=0, help="Only orders of at least so much.")

    def handle(self, *args, minimum, **options):
        orders = Order.objects.filter(total__gte=minimum)
        total = orders.aggregate(total=Sum("total"))["total"] or 0
        run = os.environ.get("TASUKI_JOB_ID", "by hand")
        self.stdout.write(f"{orders.count()} orders, {total} yen ({run}, attempt {os.environ.get('TASUKI_ATTEMPT', '-')})")
