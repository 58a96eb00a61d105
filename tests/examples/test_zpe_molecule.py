"""A molecule as JSON: what examples/zpe takes it for, and how it says what is wrong with it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from typing import Any

import pytest

from tasuki.doors.http.payload_checks import PayloadCheck
from tasuki.errors import InvalidInput
from tests.shape.source import ROOT

sys.path.insert(0, os.fspath(ROOT / "examples" / "zpe"))

from molecule import BOHR_ANGSTROM, Molecule, formula, parse
from problem import Problem

HYDROGEN: dict[str, Any] = {"element": "H", "position": [0, 0, 0]}
H2: dict[str, Any] = {"atoms": [HYDROGEN, {"element": "H", "position": [0, 0, 0.75]}]}


def refusal_of(payload: Any) -> str:
    text = payload if isinstance(payload, str | bytes) else json.dumps(payload)
    with pytest.raises(Problem) as caught:
        parse(text)
    assert caught.value.error_code == "INVALID_PAYLOAD"
    assert caught.value.permanent
    assert caught.value.exit_code == 2
    return caught.value.message


def test_angstroms_by_default_and_the_rest_filled_in() -> None:
    found = parse(json.dumps(H2))

    assert found == Molecule(
        name="H2",
        elements=["H", "H"],
        positions_bohr=[0, 0, 0, 0, 0, 0.75 / BOHR_ANGSTROM],
        masses_u=[1.008, 1.008],
        box_bohr=[14.0, 14.0, 14.0],
        pseudopotentials={"H": "H.pbe-kjpaw.UPF"},
    )


def test_everything_may_be_said() -> None:
    found = parse(
        json.dumps(
            {
                "name": "重水素",
                "unit": "bohr",
                "atoms": [{"element": "H", "position": [1, 2, 3], "mass_u": 2.014}, {"element": "F", "position": [1, 2, 4.7]}],
                "box_bohr": [12, 13, 14],
                "pseudopotentials": {"F": "F.pbe-n.UPF"},
                "ecutwfc_ry": 60,
                "ecutrho_ry": 480,
                "unpaired_electrons": 2,
                "displacement_bohr": 0.02,
            }
        )
    )

    assert found == Molecule(
        name="重水素",
        elements=["H", "F"],
        positions_bohr=[1, 2, 3, 1, 2, 4.7],
        masses_u=[2.014, 18.998],
        box_bohr=[12, 13, 14],
        pseudopotentials={"H": "H.pbe-kjpaw.UPF", "F": "F.pbe-n.UPF"},
        ecutwfc_ry=60,
        ecutrho_ry=480,
        unpaired_electrons=2,
        displacement_bohr=0.02,
    )


@pytest.mark.parametrize("name", ["h2.json", "water.json"])
def test_the_examples_are_molecules(name: str) -> None:
    assert parse((ROOT / "examples" / "zpe" / name).read_bytes()).name == {"h2.json": "H2", "water.json": "water"}[name]


@pytest.mark.parametrize("name", ["h2.json", "water.json"])
def test_the_examples_fit_the_schema_and_a_typing_error_does_not(name: str) -> None:
    molecule = json.loads((ROOT / "examples" / "zpe" / name).read_text())
    payloads = [molecule, {"atom": molecule["atoms"], "name": "wrong"}]

    async def problems() -> list[InvalidInput | None]:
        check = PayloadCheck("zpe", ROOT / "examples" / "zpe" / "schema.json")
        try:
            return await check.problems([json.dumps(payload).encode() for payload in payloads], "token:a")
        finally:
            await check.close()

    fits, wrong = asyncio.run(problems())

    assert fits is None
    assert re.search(r"\$: .*'atom' was unexpected|'atoms' is a required property", str(wrong))


def test_a_density_cutoff_follows_a_high_wave_function_cutoff() -> None:
    assert parse(json.dumps({**H2, "ecutwfc_ry": 80})).ecutrho_ry == 320


@pytest.mark.parametrize(
    ("elements", "expected"), [("H H", "H2"), ("O C O", "CO2"), ("H C H H H", "CH4"), ("O H H", "H2O"), ("N", "N")]
)
def test_a_formula(elements: str, expected: str) -> None:
    assert formula(elements.split()) == expected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"atoms": []}, "atoms must be a list of 1 to 20 atoms"),
        ({"atoms": [HYDROGEN] * 21}, "atoms must be a list of 1 to 20 atoms"),
        ({"atoms": [{"element": "H"}]}, "atoms[0]: missing required field: position"),
        (
            {"atoms": [{**HYDROGEN, "element": "Hx"}]},
            'atoms[0].element must be one of H, He, Li, Be, B, C, N, O, F, Ne, …, not "Hx"',
        ),
        ({"atoms": [{**HYDROGEN, "position": [0, 0]}]}, "atoms[0].position must be three numbers, not [0, 0]"),
        ({"atoms": [{**HYDROGEN, "position": [0, 0, "1"]}]}, 'atoms[0].position[2] must be a number from -1000 to 1000, not "1"'),
        (
            {"atoms": [{**HYDROGEN, "position": [0, True, 0]}]},
            "atoms[0].position[1] must be a number from -1000 to 1000, not true",
        ),
        ({"atoms": [{**HYDROGEN, "charge": 1}]}, 'atoms[0]: unknown field "charge"; known are element, mass_u, position'),
        ({"atoms": [HYDROGEN, {"element": "H", "position": [0, 0, 0.1]}]}, "atoms[0] and atoms[1] are 0.189 bohr apart"),
        ({"unit": "nm"}, 'unit must be one of angstrom, bohr, not "nm"'),
        ({"unit": ["bohr"]}, 'unit must be one of angstrom, bohr, not ["bohr"]'),
        ({"box_bohr": 7}, "box_bohr 7 is too small: the molecule is 1.4 bohr long there, and needs 6 to its image"),
        ({"box_bohr": 1e9}, "box_bohr[0] must be a number from 4 to 60, not 1000000000.0"),
        ({"ecutwfc_ry": 10**400}, "ecutwfc_ry must be a number from 10 to 200, not 1000"),
        ({"ecutwfc_ry": 60, "ecutrho_ry": 200}, "ecutrho_ry must be a number from 240 to 2000, not 200"),
        ({"displacement_bohr": 0}, "displacement_bohr must be a number from 0.001 to 0.1, not 0"),
        ({"unpaired_electrons": 1}, "unpaired_electrons is 1, but H2 has an even number of electrons; make it even"),
        ({"unpaired_electrons": 0.5}, "unpaired_electrons must be a whole number from 0 to 10, not 0.5"),
        ({"pseudopotentials": {"O": "O.UPF"}}, 'pseudopotentials: unknown field "O"; known are H'),
        ({"pseudopotentials": {"H": "../H.UPF"}}, 'pseudopotentials.H must be the plain name of a file, not "../H.UPF"'),
        ({"pseudopotentials": {"H": "H.UPF\n/"}}, "pseudopotentials.H must be the plain name of a file"),
        ({"name": "a\nb"}, 'name must be a text of 1 to 100 printable characters, not "a\\nb"'),
        ({"name": "\ud800"}, "name must be a text of 1 to 100 printable characters"),
        ({"frequencies_cm1": [4401.2]}, 'the payload: unknown field "frequencies_cm1"; known are atoms, box_bohr, '),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], told: str) -> None:
    assert refusal_of({**H2, **change}).startswith(told)


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ("", "the payload is no JSON: "),
        ("{", "the payload is no JSON: "),
        (b"\xff\xff", "the payload is no JSON: "),
        ("[" * 100_000, "the payload is no JSON: "),
        ('{"atoms": NaN}', "the payload is no JSON: NaN is no number of JSON"),
        ("[]", "the payload must be an object, not []"),
        ("{}", "the payload: missing required field: atoms"),
    ],
)
def test_what_is_no_molecule_at_all(payload: str | bytes, told: str) -> None:
    assert refusal_of(payload).startswith(told)


def test_an_odd_number_of_electrons_and_an_element_without_pseudopotential() -> None:
    one = "unpaired_electrons is 0, but H has an odd number of electrons; make it odd"
    neon = "there is no pseudopotential for Ne by default; name its file: pseudopotentials.Ne"

    assert refusal_of({"atoms": [HYDROGEN]}) == one
    assert refusal_of({"atoms": [{"element": "Ne", "position": [0, 0, 0]}]}) == neon
