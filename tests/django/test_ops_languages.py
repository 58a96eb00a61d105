"""The Japanese of the operations screens: complete, and compiled as it is written, since a clone has no msgfmt."""

from __future__ import annotations

import ast
import gettext
import re

from tests.support.processes import SOURCE

OPS = SOURCE / "tasuki" / "django" / "ops"
CATALOG = SOURCE / "tasuki" / "django" / "locale" / "ja" / "LC_MESSAGES" / "django.po"
COMPILE = "msgfmt --check -o django.mo django.po"
_CALL = re.compile(r'\b(?:_|lazy|ngettext)\(\s*("(?:[^"\\]|\\.)*"|\'[^\']*\')')
_TAG = re.compile(r'\{% translate ("[^"]*") %\}|_\(("[^"]*")\)')


def written() -> dict[str, str]:
    """Return the translations of the catalog."""
    text = CATALOG.read_text("utf-8")
    found = re.findall(r'^msgid (".*")\n(?:msgid_plural .*\n)?msgstr(?:\[0\])? (".*")$', text, re.MULTILINE)
    return {ast.literal_eval(key): ast.literal_eval(value) for key, value in found if key != '""'}


def asked_for() -> set[str]:
    """Return the texts that screens translate."""
    texts = {text for file in OPS.glob("*.py") for text in _CALL.findall(file.read_text("utf-8"))}
    tags = [tag for file in OPS.glob("templates/ops/*.html") for tag in _TAG.findall(file.read_text("utf-8"))]
    return {ast.literal_eval(text) for text in texts | {first or second for first, second in tags}}


def test_every_text_of_the_screens_has_a_translation_and_no_other_is_kept() -> None:
    assert asked_for() == written().keys()


def test_the_compiled_catalog_is_that_of_the_source() -> None:
    with CATALOG.with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)

    found = {key: compiled.ngettext(key, key, 1) if key.startswith("%d dead") else compiled.gettext(key) for key in written()}
    assert found == written(), COMPILE


def test_translations_have_the_places_of_their_sources() -> None:
    places = re.compile(r"%(?:\(\w+\))?[sd]")

    assert {key for key, text in written().items() if sorted(places.findall(text)) != sorted(places.findall(key))} == set()
