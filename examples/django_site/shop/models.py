"""Orders, and the invoices that tasks make for them."""

from django.db import models


class Order(models.Model):
    customer = models.CharField(max_length=100)
    total = models.IntegerField()


class Invoice(models.Model):
    order = models.OneToOneField(Order, on_delete=models.CASCADE)
    text = models.TextField()
