from django.db import migrations

# What the statement `enqueue` does, for one job. A project's connections prepare nothing, so that statement is planned whenever
# it runs; a function is planned once for each connection.
CREATE = """
CREATE FUNCTION tasuki_enqueue(
    job_id text, subject text, its_group text, submitter text, body_hash bytea, spec bytea, exec text, kind smallint,
    priority smallint, not_before float8, not_after float8, max_retries integer, max_losses integer, backoff_s float8, array_id text
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    wall float8 := extract(epoch FROM clock_timestamp());
    new_id bigint;
BEGIN
    INSERT INTO tasuki_jobrun (created_at, idempotency_key, subject, "group", submitter, body_hash, spec,
                               exec, kind, priority, ready, not_before, not_after, max_retries, max_losses, backoff_s, array_id)
    VALUES (wall, job_id, subject, its_group, submitter, body_hash, spec, exec, kind, priority,
            CASE WHEN not_before > wall THEN 2 ELSE 1 END, not_before, not_after, max_retries, max_losses, backoff_s, array_id)
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING id INTO new_id;
    IF FOUND THEN
        INSERT INTO tasuki_counter ("group", state, n, shard) VALUES (its_group, 'pending', 1, NULL);
    END IF;
    RETURN new_id;
END $$
"""


def create(apps, schema_editor):
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(CREATE)


def drop(apps, schema_editor):
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("DROP FUNCTION tasuki_enqueue")


class Migration(migrations.Migration):

    dependencies = [
        ('tasuki', '0013_cachefile'),
    ]

    operations = [migrations.RunPython(create, drop)]
