"""The numbers of examples/zpe: frequencies of models that can be solved on paper, and of forces that pw.x once gave."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shape.source import ROOT

sys.path.insert(0, os.fspath(ROOT / "examples" / "zpe"))

from vibrations import EV_PER_CM1, centred, eigen, frequencies_cm1, rigid_motions, vibrational_basis, zero_point_ev

Vector = list[float]
Forces = Callable[[Vector], Vector]

RYDBERG_J, BOHR_M, ATOMIC_MASS_KG, LIGHT_CM_S = 2.1798723611035e-18, 5.29177210903e-11, 1.66053906660e-27, 2.99792458e10
STEP = 0.01
H, C, O = 1.008, 12.011, 15.999  # noqa: E741


def wavenumber(eigenvalue: float) -> float:
    """From Ry/(bohr²·u) to cm⁻¹ by way of the SI units, which the program does not use."""
    return math.sqrt(eigenvalue * RYDBERG_J / BOHR_M**2 / ATOMIC_MASS_KG) / (2 * math.pi * LIGHT_CM_S)


def springs(rest: Vector, *stiff: tuple[float, Vector]) -> Forces:
    """The forces of E = ½ Σ k·(s·(x - rest))², for pairs of a constant k and the gradient s of some coordinate."""

    def forces_at(positions: Vector) -> Vector:
        moved = [place - at_rest for place, at_rest in zip(positions, rest, strict=True)]
        pulls = [(-constant * dot(gradient, moved), gradient) for constant, gradient in stiff]
        return [sum(pull * gradient[index] for pull, gradient in pulls) for index in range(len(rest))]

    return forces_at


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


# ---------------------------------------------------------------------------------------------------- models


def diatomic(constant: float) -> tuple[Vector, Forces]:
    rest = [0.0, 0.0, 0.0, 0.0, 0.0, 1.4]
    return rest, springs(rest, (constant, [0, 0, -1.0, 0, 0, 1.0]))


def linear_triatomic(stretch: float, bend: float, length: float) -> tuple[Vector, Forces]:
    """O=C=O along x: two bonds, and the angle's change from 180° in both planes across."""
    rest = [-length, 0.0, 0.0, 0.0, 0.0, 0.0, length, 0.0, 0.0]
    bonds = [[-1.0, 0, 0, 1.0, 0, 0, 0, 0, 0], [0, 0, 0, -1.0, 0, 0, 1.0, 0, 0]]
    side = 1 / length
    angles = [[0, side, 0, 0, -2 * side, 0, 0, side, 0], [0, 0, side, 0, 0, -2 * side, 0, 0, side]]
    return rest, springs(rest, *((stretch, bond) for bond in bonds), *((bend, angle) for angle in angles))


def bent_triatomic(stretch: float, bend: float, length: float, angle: float) -> tuple[Vector, Forces]:
    """H-O-H in the plane of x and y, the oxygen first."""
    half = angle / 2
    first, second = [math.sin(half), math.cos(half), 0.0], [-math.sin(half), math.cos(half), 0.0]
    rest = [0.0, 0.0, 0.0, *(length * part for part in first), *(length * part for part in second)]
    bonds = [[*(-part for part in first), *first, 0.0, 0.0, 0.0], [*(-part for part in second), 0.0, 0.0, 0.0, *second]]
    # The angle opens fastest where a hydrogen goes at right angles to its bond, away from the other one.
    opens = [[math.cos(half) / length, -math.sin(half) / length, 0.0], [-math.cos(half) / length, -math.sin(half) / length, 0.0]]
    opening = [*(-a - b for a, b in zip(*opens, strict=True)), *opens[0], *opens[1]]
    return rest, springs(rest, *((stretch, bond) for bond in bonds), (bend, opening))


def test_a_diatomic_molecule_has_the_frequency_of_its_reduced_mass() -> None:
    rest, forces_at = diatomic(constant=0.7)

    found = frequencies_cm1(rest, [C, O], forces_at, STEP)

    assert found == pytest.approx([wavenumber(0.7 * (1 / C + 1 / O))], rel=1e-9)


def test_a_linear_molecule_has_four_modes_and_its_bends_are_two() -> None:
    stretch, bend, length = 1.9, 0.35, 2.2
    rest, forces_at = linear_triatomic(stretch, bend, length)

    found = frequencies_cm1(rest, [O, C, O], forces_at, STEP)

    bending = wavenumber(2 * bend / length**2 / O * (1 + 2 * O / C))
    stretching = [wavenumber(stretch / O), wavenumber(stretch / O * (1 + 2 * O / C))]
    assert found == pytest.approx(sorted([bending, bending, *stretching]), rel=1e-9)


def water_frequencies(stretch: float, bend: float, length: float, angle: float) -> list[float]:
    """Wilson's G and F matrices of a bent XY2 molecule, solved by hand."""
    cosine, sine = math.cos(angle), math.sin(angle)
    g11, g12 = 1 / H + (1 + cosine) / O, -math.sqrt(2) * sine / (O * length)
    g22 = 2 / length**2 * (1 / H + (1 - cosine) / O)
    trace, determinant = stretch * g11 + bend * g22, stretch * bend * (g11 * g22 - g12**2)
    root = math.sqrt(trace**2 / 4 - determinant)
    asymmetric = stretch * (1 / H + (1 - cosine) / O)
    return sorted(wavenumber(value) for value in (trace / 2 - root, trace / 2 + root, asymmetric))


WATER = (1.08, 0.32, 1.83, math.radians(104.5))


def test_a_bent_molecule_has_three_modes() -> None:
    rest, forces_at = bent_triatomic(*WATER)

    found = frequencies_cm1(rest, [O, H, H], forces_at, STEP)

    assert found == pytest.approx(water_frequencies(*WATER), rel=1e-9)
    assert 1500 < found[0] < 1800
    assert 3500 < found[1] < found[2] < 4000


@given(st.tuples(*[st.floats(-1, 1)] * 4).filter(lambda turn: math.hypot(*turn) > 0.1), st.tuples(*[st.floats(-20, 20)] * 3))
def test_frequencies_do_not_depend_on_where_the_molecule_is_and_how_it_lies(
    turn: tuple[float, ...], place: tuple[float, ...]
) -> None:
    w, x, y, z = (part / math.hypot(*turn) for part in turn)
    rotation = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]

    def turned(vector: Vector) -> Vector:
        return [dot(row, vector[start : start + 3]) for start in range(0, len(vector), 3) for row in rotation]

    def back(vector: Vector) -> Vector:
        columns = list(zip(*rotation, strict=True))
        return [dot(column, vector[start : start + 3]) for start in range(0, len(vector), 3) for column in columns]

    for (rest, forces_at), masses, expected in (
        (bent_triatomic(*WATER), [O, H, H], water_frequencies(*WATER)),
        (diatomic(0.7), [C, O], [wavenumber(0.7 * (1 / C + 1 / O))]),
    ):
        moved = [part + place[index % 3] for index, part in enumerate(turned(rest))]

        def forces_there(positions: Vector, forces_at: Forces = forces_at) -> Vector:
            return turned(forces_at(back([part - place[index % 3] for index, part in enumerate(positions)])))

        assert frequencies_cm1(moved, masses, forces_there, STEP) == pytest.approx(expected, rel=1e-6)


def test_what_a_box_does_to_the_molecule_as_a_whole_is_no_vibration() -> None:
    rest, forces_at = bent_triatomic(*WATER)
    masses = [O, H, H]

    def in_a_box(positions: Vector) -> Vector:
        shifts = [dot(masses, [positions[i] - rest[i] for i in (axis, axis + 3, axis + 6)]) / sum(masses) for axis in range(3)]
        return [force - 5.0 * masses[index // 3] * shifts[index % 3] for index, force in enumerate(forces_at(positions))]

    assert in_a_box([place + 0.1 for place in rest]) != forces_at(rest)
    assert frequencies_cm1(rest, masses, in_a_box, STEP) == pytest.approx(water_frequencies(*WATER), rel=1e-9)


def test_an_anharmonic_bond_has_the_frequency_of_its_curvature() -> None:
    depth, width, length = 0.35, 1.03, 1.4

    def morse(positions: Vector) -> Vector:
        decay = math.exp(-width * (math.dist(positions[:3], positions[3:]) - length))
        pull = -2 * depth * width * (decay - decay**2)
        return [0.0, 0.0, -pull, 0.0, 0.0, pull]

    found = frequencies_cm1([0.0, 0.0, 0.0, 0.0, 0.0, length], [H, H], morse, STEP)

    assert found == pytest.approx([wavenumber(2 * depth * width**2 * 2 / H)], rel=1e-3)


def test_a_saddle_has_an_imaginary_frequency_that_counts_for_nothing() -> None:
    rest, forces_at = linear_triatomic(stretch=1.9, bend=-0.1, length=2.2)

    found = frequencies_cm1(rest, [O, C, O], forces_at, STEP)

    assert [frequency < 0 for frequency in found] == [True, True, False, False]
    assert found[0] == pytest.approx(-wavenumber(2 * 0.1 / 2.2**2 / O * (1 + 2 * O / C)), rel=1e-9)
    assert zero_point_ev(found) == pytest.approx(sum(found[2:]) / 2 * EV_PER_CM1, rel=1e-12)


def test_the_forces_that_pw_gave_for_h2() -> None:
    """PBE, 40/200 Ry: both atoms 0.01 bohr outwards, and both inwards. The mode's λ is the force's slope over the mass."""
    rest = [6.2899213448, 7.0, 7.0, 7.7100786552, 7.0, 7.0]

    def recorded(positions: Vector) -> Vector:
        assert abs(positions[3] - rest[3]) == pytest.approx(0.01)
        force = -0.01365989 if positions[3] > rest[3] else 0.01461594
        return [-force, 0.0, 0.0, force, 0.0, 0.0]

    found = frequencies_cm1(rest, [H, H], recorded, 0.01)

    assert found == pytest.approx([wavenumber((0.01365989 + 0.01461594) / 0.02 / H)], rel=1e-9)
    assert found == pytest.approx([4304.6], abs=0.5)
    assert zero_point_ev(found) == pytest.approx(0.26685, abs=5e-5)


# ---------------------------------------------------------------------------------------------------- the space of vibrations


@pytest.mark.parametrize(
    ("positions", "masses", "rigid"),
    [
        ([1.0, 2.0, 3.0], [O], 3),
        ([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], [H, H], 5),
        ([-2.2, 0.0, 0.0, 0.0, 0.001, 0.0, 2.2, 0.0, 0.0], [O, C, O], 5),
        ([-2.2, 0.0, 0.0, 0.0, 0.1, 0.0, 2.2, 0.0, 0.0], [O, C, O], 6),
        (bent_triatomic(*WATER)[0], [O, H, H], 6),
    ],
    ids=["atom", "diatomic", "linear within rounding", "slightly bent", "water"],
)
def test_translations_and_rotations_are_counted_and_leave_the_rest(positions: Vector, masses: list[float], rigid: int) -> None:
    motions, basis = rigid_motions(positions, masses), vibrational_basis(positions, masses)

    assert (len(motions), len(basis)) == (rigid, len(positions) - rigid)
    everything = [*motions, *basis]
    for row, left in enumerate(everything):
        assert [dot(left, right) for right in everything] == pytest.approx([float(row == at) for at in range(len(everything))])


def test_each_vibration_costs_two_calculations_and_an_atom_none() -> None:
    rest, forces_at = bent_triatomic(*WATER)
    asked: list[Vector] = []

    def counted(positions: Vector) -> Vector:
        asked.append(positions)
        return forces_at(positions)

    frequencies_cm1(rest, [O, H, H], counted, STEP)
    farthest = [max(math.dist(there[i : i + 3], rest[i : i + 3]) for i in (0, 3, 6)) for there in asked]

    assert len(asked) == 6
    assert farthest == pytest.approx([STEP] * 6)
    assert frequencies_cm1([0.0, 0.0, 0.0], [H], counted, STEP) == []
    assert zero_point_ev([]) == 0


def test_the_centre_of_mass_is_the_origin() -> None:
    assert centred([0.0, 0.0, 0.0, 4.0, 0.0, 8.0], [3.0, 1.0]) == [-1.0, 0.0, -2.0, 3.0, 0.0, 6.0]


# ---------------------------------------------------------------------------------------------------- linear algebra


def test_the_eigenvalues_of_a_matrix_that_everybody_knows() -> None:
    values, vectors = eigen([[2.0, 1.0], [1.0, 2.0]])

    assert values == pytest.approx([1.0, 3.0])
    assert [abs(part) for vector in vectors for part in vector] == pytest.approx([math.sqrt(0.5)] * 4)


@given(
    st.integers(1, 6).flatmap(
        lambda size: st.lists(st.lists(st.floats(-1e3, 1e3), min_size=size, max_size=size), min_size=size, max_size=size)
    )
)
def test_eigenvectors_are_orthonormal_and_only_stretched(matrix: list[list[float]]) -> None:
    size = len(matrix)
    symmetric = [[matrix[max(row, column)][min(row, column)] for column in range(size)] for row in range(size)]

    values, vectors = eigen(symmetric)

    assert values == sorted(values)
    for row, vector in enumerate(vectors):
        stretched = [dot(line, vector) for line in symmetric]
        assert stretched == pytest.approx([values[row] * part for part in vector], abs=1e-9)
        assert [dot(vector, other) for other in vectors] == pytest.approx([float(row == at) for at in range(size)], abs=1e-12)
