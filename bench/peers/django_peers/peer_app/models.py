"""A row that a web process writes, as `Order` of the example."""

from django.db import models


class Order(models.Model):
    customer = models.CharField(max_length=100)
    total = models.IntegerField()
