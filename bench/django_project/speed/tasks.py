"""Tasks of the bench."""

from speed.stamps import stamp

try:
    from django.tasks import task
except ImportError:  # Django 5.2
    from django_tasks import task


@task
def stamped(name):
    stamp(name)


@task
def empty():
    pass
