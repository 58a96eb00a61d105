"""One view: an order and its invoice, both or neither."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from shop.models import Order
from shop.tasks import send_invoice


@csrf_exempt
@require_POST
def place_order(request: HttpRequest) -> JsonResponse:
    with transaction.atomic():
        order = Order.objects.create(customer=request.POST["customer"], total=int(request.POST["total"]))
        result = send_invoice.enqueue(order.pk)
    return JsonResponse({"order": order.pk, "task": result.id})
