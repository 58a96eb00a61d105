"""A molecule from JSON. Pure: whatever pw.x could not make sense of is refused here, with the name of the field.

Every text that reaches pw.x's input is an element's symbol or a plain file name, so a payload can be no more than data in it.
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from problem import INVALID_PAYLOAD, Problem

BOHR_ANGSTROM = 0.529177210903  # CODATA 2018
UNITS_PER_BOHR = {"angstrom": BOHR_ANGSTROM, "bohr": 1.0}
ATOMS_MAX = 20
NEAREST_BOHR = 0.6  # the shortest bond, that of H2, is 1.4
VACUUM_BOHR, VACUUM_MIN_BOHR = 12.0, 6.0  # between a molecule and its periodic image
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")

# From hydrogen to xenon, in the order of their atomic numbers, with the standard atomic weights in u (IUPAC 2021, abridged).
WEIGHTS_U = {
    "H": 1.008, "He": 4.0026, "Li": 6.94, "Be": 9.0122, "B": 10.81, "C": 12.011, "N": 14.007, "O": 15.999, "F": 18.998,
    "Ne": 20.180, "Na": 22.990, "Mg": 24.305, "Al": 26.982, "Si": 28.085, "P": 30.974, "S": 32.06, "Cl": 35.45, "Ar": 39.95,
    "K": 39.098, "Ca": 40.078, "Sc": 44.956, "Ti": 47.867, "V": 50.942, "Cr": 51.996, "Mn": 54.938, "Fe": 55.845, "Co": 58.933,
    "Ni": 58.693, "Cu": 63.546, "Zn": 65.38, "Ga": 69.723, "Ge": 72.630, "As": 74.922, "Se": 78.971, "Br": 79.904, "Kr": 83.798,
    "Rb": 85.468, "Sr": 87.62, "Y": 88.906, "Zr": 91.224, "Nb": 92.906, "Mo": 95.95, "Tc": 97.0, "Ru": 101.07, "Rh": 102.91,
    "Pd": 106.42, "Ag": 107.87, "Cd": 112.41, "In": 114.82, "Sn": 118.71, "Sb": 121.76, "Te": 127.60, "I": 126.90, "Xe": 131.29,
}  # fmt: skip
ATOMIC_NUMBERS = {element: number for number, element in enumerate(WEIGHTS_U, 1)}

# PBE, from Debian's quantum-espresso-data. Other elements and functionals: name them in the payload.
PSEUDOPOTENTIALS = {
    "H": "H.pbe-kjpaw.UPF",
    "B": "B.pbe-n-kjpaw_psl.0.1.UPF",
    "C": "C.pbe-n-kjpaw_psl.0.1.UPF",
    "N": "N.pbe-kjpaw.UPF",
    "O": "O.pbe-kjpaw.UPF",
    "Si": "Si.pbe-nl-rrkjus_psl.1.0.0.UPF",
    "I": "I.pbe-n-kjpaw_psl.1.0.0.UPF",
}


@dataclass(frozen=True, kw_only=True)
class Molecule:
    """A molecule, and how it is computed. Positions are x, y, z of the first atom, then of the second, and so on."""

    name: str
    elements: list[str]
    positions_bohr: list[float]
    masses_u: list[float]
    box_bohr: list[float]
    pseudopotentials: dict[str, str] = field(default_factory=lambda: dict(PSEUDOPOTENTIALS))
    ecutwfc_ry: float = 50.0
    ecutrho_ry: float = 250.0
    unpaired_electrons: int = 0
    displacement_bohr: float = 0.01


def parse(text: str | bytes) -> Molecule:
    """The molecule that a payload describes, or Problem INVALID_PAYLOAD."""
    try:
        payload = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the payload is no JSON: {error}") from error
    fields = _fields(payload, "the payload", required={"atoms"}, optional=PAYLOAD_FIELDS)
    per_bohr = UNITS_PER_BOHR[_one_of(fields.get("unit", "angstrom"), "unit", UNITS_PER_BOHR)]
    elements, positions, masses = _atoms(fields["atoms"], per_bohr)
    unpaired = _unpaired(fields.get("unpaired_electrons", 0), elements)
    ecutwfc = _number(fields.get("ecutwfc_ry", Molecule.ecutwfc_ry), "ecutwfc_ry", 10, 200)
    ecutrho = _number(fields.get("ecutrho_ry", max(Molecule.ecutrho_ry, 4 * ecutwfc)), "ecutrho_ry", 4 * ecutwfc, 2000)
    return Molecule(
        name=_name(fields.get("name", formula(elements))),
        elements=elements,
        positions_bohr=positions,
        masses_u=masses,
        box_bohr=_box(fields.get("box_bohr"), positions),
        pseudopotentials=_pseudopotentials(fields.get("pseudopotentials", {}), elements),
        ecutwfc_ry=ecutwfc,
        ecutrho_ry=ecutrho,
        unpaired_electrons=unpaired,
        displacement_bohr=_number(fields.get("displacement_bohr", Molecule.displacement_bohr), "displacement_bohr", 0.001, 0.1),
    )


PAYLOAD_FIELDS = {
    "name", "unit", "box_bohr", "pseudopotentials", "ecutwfc_ry", "ecutrho_ry", "unpaired_electrons", "displacement_bohr",
}  # fmt: skip


def formula(elements: list[str]) -> str:
    """In Hill's order: carbon, hydrogen, then the alphabet; without carbon the alphabet alone."""
    counts = Counter(elements)
    first = [element for element in ("C", "H") if "C" in counts and element in counts]
    ordered = first + sorted(set(counts) - set(first))
    return "".join(element + (str(counts[element]) if counts[element] > 1 else "") for element in ordered)


# ---------------------------------------------------------------------------------------------------- the fields


def _atoms(value: Any, per_bohr: float) -> tuple[list[str], list[float], list[float]]:
    if not isinstance(value, list) or not 1 <= len(value) <= ATOMS_MAX:
        raise _invalid(f"atoms must be a list of 1 to {ATOMS_MAX} atoms")
    elements, positions, masses = [], [], []
    for index, atom in enumerate(value):
        where = f"atoms[{index}]"
        fields = _fields(atom, where, required={"element", "position"}, optional={"mass_u"})
        element = _one_of(fields["element"], f"{where}.element", WEIGHTS_U)
        elements.append(element)
        positions += [place / per_bohr for place in _three(fields["position"], f"{where}.position", -1000, 1000)]
        masses.append(_number(fields.get("mass_u", WEIGHTS_U[element]), f"{where}.mass_u", 0.5, 500))
    _check_distances(positions)
    return elements, positions, masses


def _check_distances(positions: list[float]) -> None:
    points = [positions[start : start + 3] for start in range(0, len(positions), 3)]
    for second, point in enumerate(points):
        for first in range(second):
            distance = math.dist(points[first], point)
            if distance < NEAREST_BOHR:
                raise _invalid(
                    f"atoms[{first}] and atoms[{second}] are {distance:.3f} bohr apart, less than {NEAREST_BOHR}; "
                    'check the positions and their unit ("angstrom" or "bohr")'
                )


def _box(value: Any, positions: list[float]) -> list[float]:
    extents = [max(positions[axis::3]) - min(positions[axis::3]) for axis in range(3)]
    if value is None:
        return [float(math.ceil(max(extents) + VACUUM_BOHR))] * 3
    box = _three(value if isinstance(value, list) else [value] * 3, "box_bohr", 4, 60)
    for side, extent in zip(box, extents, strict=True):
        if side < extent + VACUUM_MIN_BOHR:
            raise _invalid(
                f"box_bohr {side:g} is too small: the molecule is {extent:.1f} bohr long there, and needs "
                f"{VACUUM_MIN_BOHR:g} to its image; leave it out for {VACUUM_BOHR:g}"
            )
    return box


def _pseudopotentials(value: Any, elements: list[str]) -> dict[str, str]:
    named = _fields(value, "pseudopotentials", required=set(), optional=set(elements))
    chosen = {}
    for element in dict.fromkeys(elements):
        name = named.get(element, PSEUDOPOTENTIALS.get(element))
        if name is None:
            raise _invalid(f"there is no pseudopotential for {element} by default; name its file: pseudopotentials.{element}")
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise _invalid(f"pseudopotentials.{element} must be the plain name of a file, not {_shown(name)}")
        chosen[element] = name
    return chosen


def _unpaired(value: Any, elements: list[str]) -> int:
    electrons = sum(ATOMIC_NUMBERS[element] for element in elements)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= min(electrons, 10):
        raise _invalid(f"unpaired_electrons must be a whole number from 0 to 10, not {_shown(value)}")
    if (electrons - value) % 2:
        parity = "odd" if electrons % 2 else "even"
        raise _invalid(
            f"unpaired_electrons is {value}, but {formula(elements)} has an {parity} number of electrons; make it {parity}"
        )
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 100 or not value.isprintable():
        raise _invalid(f"name must be a text of 1 to 100 printable characters, not {_shown(value)}")
    return value


# ---------------------------------------------------------------------------------------------------- kinds of values


def _fields(value: Any, where: str, *, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(f"{where} must be an object, not {_shown(value)}")
    if missing := sorted(required - value.keys()):
        raise _invalid(f"{where}: missing required field: {missing[0]}")
    if unknown := sorted(value.keys() - required - optional):
        known = ", ".join(sorted(required | optional))
        raise _invalid(f"{where}: unknown field {_shown(unknown[0])}; known are {known}")
    return value


def _one_of(value: Any, where: str, known: dict[str, Any]) -> str:
    if not isinstance(value, str) or value not in known:
        some = ", ".join(list(known)[:10]) + (", …" if len(known) > 10 else "")
        raise _invalid(f"{where} must be one of {some}, not {_shown(value)}")
    return value


def _three(value: Any, where: str, low: float, high: float) -> list[float]:
    if not isinstance(value, list) or len(value) != 3:
        raise _invalid(f"{where} must be three numbers, not {_shown(value)}")
    return [_number(item, f"{where}[{index}]", low, high) for index, item in enumerate(value)]


def _number(value: Any, where: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _invalid(f"{where} must be a number from {low:g} to {high:g}, not {_shown(value)}")
    return float(value)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _invalid(message: str) -> Problem:
    return Problem(INVALID_PAYLOAD, message)
