"""The Django app: models and migrations, the one source of the SQL schema, for the standalone server and for a user's project.

The SQL store imports it, so it imports nothing of tasuki but `core` and `errors`. This file imports nothing: `django.setup()` has
to come first.

    models       the tables
    fields       field types, storage parameters of PostgreSQL's tables
    standalone   Django without a project; migrations and their version check
    apps         the app's configuration
"""
