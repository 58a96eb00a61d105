"""Tests of the shop, without a worker: `python manage.py test`."""

from django.test import TestCase
from django.utils import timezone

from shop.models import Invoice, Order
from shop.tasks import greet, send_invoice
from tasuki.django import emit, enqueue_command
from tasuki.django.logs import read_log
from tasuki.django.models import JobDefinition
from tasuki.django.testing import assert_enqueued, enqueued, fire_due, immediate, run_enqueued


class PlacingAnOrder(TestCase):
    def place(self):
        return self.client.post("/orders/", {"customer": "Sato", "total": "300"}).json()

    def test_enqueues_the_invoice_with_the_order(self):
        placed = self.place()

        assert_enqueued(send_invoice, placed["order"], count=1)
        with self.assertRaisesMessage(AssertionError, f"what waits:\n    shop.tasks.send_invoice [{placed['order']}] {{}}"):
            assert_enqueued(greet)

    def test_makes_the_invoice(self):
        placed = self.place()

        [job] = run_enqueued()

        self.assertEqual((job.job_id, str(job.state)), (placed["task"], "SUCCEEDED"))
        self.assertEqual(Invoice.objects.get().text, "Sato: 300 yen")
        self.assertEqual(enqueued(), [])

    def test_makes_no_second_invoice_for_a_second_attempt(self):
        order = Order.objects.create(customer="Sato", total=300)
        with immediate():
            first, second = send_invoice.enqueue(order.pk), send_invoice.enqueue(order.pk)

        self.assertEqual(first.return_value, second.return_value)


class OtherJobs(TestCase):
    def test_a_task_that_raises_has_failed(self):
        with immediate():
            result = send_invoice.enqueue(999)

        self.assertEqual(result.status, "FAILED")
        self.assertEqual(result.errors[0].exception_class_path, "shop.models.Order.DoesNotExist")

    def test_the_report_counts_orders(self):
        Order.objects.create(customer="Sato", total=300)
        job_id = enqueue_command("daily_report", "--minimum=100")
        assert_enqueued("daily_report", "--minimum=100")

        run_enqueued()

        [part] = read_log(job_id, "stdout")
        self.assertIn(b"1 orders, 300 yen", part.data)

    def test_an_async_task_gets_its_context(self):
        with immediate():
            self.assertEqual(greet.enqueue("Sato").return_value, "Sato, attempt 1")


class Schedules(TestCase):
    def test_the_report_is_due_every_hour(self):
        definition = JobDefinition(name="report", command_name="daily_report", schedule_type="hourly_at_minute")
        definition.schedule_value = "0"
        definition.full_clean()
        definition.save()
        [at] = definition.preview(1)

        self.assertEqual(fire_due(timezone.now()), [])
        [run] = fire_due(at)

        self.assertEqual(run.spec.args, ("daily_report",))
        self.assertEqual([str(job.state) for job in run_enqueued()], ["SUCCEEDED"])

    def test_an_event_is_one_run(self):
        definition = JobDefinition(name="report", command_name="daily_report", type="event", event_type="order.*")
        definition.full_clean()
        definition.save()
        emit("order.paid", dedupe_key="order-17")
        emit("order.paid", dedupe_key="order-17")

        [run] = fire_due(timezone.now())

        self.assertEqual(run.spec.args, ("daily_report", "--event=null"))
        self.assertEqual(fire_due(timezone.now()), [])
