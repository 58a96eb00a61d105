"""Tasks of the shop: plain functions, called in a process of `manage.py tasuki_worker`."""

from shop.models import Invoice, Order

try:
    from django.tasks import task
except ImportError:  # Django 5.2
    from django_tasks import task


@task
def send_invoice(order_id):
    """Make the invoice of an order. An attempt may come after one that was cut off, so it must not make a second one."""
    order = Order.objects.get(pk=order_id)
    invoice, _created = Invoice.objects.get_or_create(order=order, defaults={"text": f"{order.customer}: {order.total} yen"})
    return {"invoice": invoice.pk, "text": invoice.text}


@task(queue_name="mail", takes_context=True)
async def greet(context, name):
    return f"{name}, attempt {context.attempt}"
