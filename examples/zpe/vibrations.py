"""Harmonic frequencies and the zero-point energy, from forces alone. Pure: pw.x, or a model in a test, gives the forces.

The theory in short. In mass-weighted coordinates q = √m·x a molecule near its minimum is a set of springs, E = ½ qᵀHq, and the
eigenvalues of H are the squares of its frequencies. Three directions of q are translations and up to three are rotations
(a linear molecule has two, an atom none); they cost no energy, and whatever a finite box or a finite step makes of them is
noise. So H is taken in the space at right angles to them only: one central difference of the forces per vibration, 2·(3N - 6)
calculations instead of 2·3N, and exactly what projecting the whole Hessian would give.

Vectors are x, y, z of the first atom, then of the second. Lengths are in bohr, forces in Ry/bohr, masses in u.
"""

import math
from collections.abc import Callable, Sequence

Vector = list[float]
Matrix = list[list[float]]

# CODATA 2018
HARTREE_EV = 27.211386245988
HARTREE_CM1 = 219474.63136320
ELECTRON_MASSES_PER_U = 1822.888486209
EV_PER_CM1 = HARTREE_EV / HARTREE_CM1

LINEAR_RATIO = 1e-5  # of the moments of inertia about and across the axis: a bend of about 0.2 degrees
SWEEPS_MAX = 50
ROUNDING = 1e-15


def frequencies_cm1(
    positions: Vector, masses: Sequence[float], forces_at: Callable[[Vector], Vector], displacement: float
) -> list[float]:
    """The frequencies at a relaxed geometry, lowest first; an imaginary one is given as a negative number.

    `displacement` is how far the atom that moves most is moved, to either side.
    """
    basis = vibrational_basis(positions, masses)
    columns = []
    for direction in basis:
        moves = [part / root for part, root in zip(direction, _roots(masses), strict=True)]
        step = displacement / max(math.hypot(*moves[start : start + 3]) for start in range(0, len(moves), 3))
        ahead = forces_at([place + step * move for place, move in zip(positions, moves, strict=True)])
        behind = forces_at([place - step * move for place, move in zip(positions, moves, strict=True)])
        slope = [(back - front) / (2 * step) for front, back in zip(ahead, behind, strict=True)]
        weighted = [part / root for part, root in zip(slope, _roots(masses), strict=True)]
        columns.append([_dot(other, weighted) for other in basis])
    values, _ = eigen(_symmetric(columns))
    return [frequency_of(value) for value in values]


def frequency_of(eigenvalue: float) -> float:
    """From Ry/(bohr²·u) to cm⁻¹; the sign is kept."""
    hartree_squared = abs(eigenvalue) / 2 / ELECTRON_MASSES_PER_U
    return math.copysign(math.sqrt(hartree_squared) * HARTREE_CM1, eigenvalue)


def zero_point_ev(frequencies: Sequence[float]) -> float:
    """Half a quantum for each real frequency; an imaginary one has none."""
    return sum(frequency for frequency in frequencies if frequency > 0) / 2 * EV_PER_CM1


# ---------------------------------------------------------------------------------------------------- the space of vibrations


def vibrational_basis(positions: Vector, masses: Sequence[float]) -> Matrix:
    """Orthonormal mass-weighted directions that neither move the molecule as a whole nor turn it."""
    rigid = rigid_motions(positions, masses)
    size = len(positions)
    projector = [
        [float(row == column) - sum(motion[row] * motion[column] for motion in rigid) for column in range(size)]
        for row in range(size)
    ]
    # A projector's eigenvalues are 0 and 1. Rounding moves them by far less than a half.
    values, vectors = eigen(projector)
    return [vector for value, vector in zip(values, vectors, strict=True) if value > 0.5]


def rigid_motions(positions: Vector, masses: Sequence[float]) -> Matrix:
    """Three translations and 0, 2 or 3 rotations about the principal axes: orthonormal in mass-weighted coordinates."""
    roots = [math.sqrt(mass) for mass in masses]
    whole = math.sqrt(sum(masses))
    arms = centred(positions, masses)
    motions = [[root / whole if axis == moved else 0.0 for root in roots for axis in range(3)] for moved in range(3)]
    moments, axes = eigen(_inertia(arms, masses))
    for moment, axis in zip(moments, axes, strict=True):
        if moment > LINEAR_RATIO * moments[-1]:
            turned = [_cross(axis, arms[3 * atom : 3 * atom + 3]) for atom in range(len(masses))]
            length = math.sqrt(moment)
            motions.append([root * part / length for root, turn in zip(roots, turned, strict=True) for part in turn])
    return motions


def centred(positions: Vector, masses: Sequence[float]) -> Vector:
    """The positions as seen from the centre of mass."""
    centre = [_dot(masses, positions[axis::3]) / sum(masses) for axis in range(3)]
    return [place - centre[index % 3] for index, place in enumerate(positions)]


def _inertia(arms: Vector, masses: Sequence[float]) -> Matrix:
    tensor = [[0.0] * 3 for _ in range(3)]
    for atom, mass in enumerate(masses):
        arm = arms[3 * atom : 3 * atom + 3]
        for row in range(3):
            for column in range(3):
                tensor[row][column] += mass * (float(row == column) * _dot(arm, arm) - arm[row] * arm[column])
    return tensor


# ---------------------------------------------------------------------------------------------------- linear algebra


def eigen(matrix: Matrix) -> tuple[list[float], Matrix]:
    """The eigenvalues of a symmetric matrix, lowest first, and their orthonormal eigenvectors: Jacobi's rotations."""
    rows = [list(row) for row in matrix]
    size = len(rows)
    vectors = [[float(row == column) for column in range(size)] for row in range(size)]
    negligible = ROUNDING * max((abs(value) for row in rows for value in row), default=0.0)
    for _ in range(SWEEPS_MAX):
        pairs = [(p, q) for p in range(size) for q in range(p + 1, size) if abs(rows[p][q]) > negligible]
        if not pairs:
            break
        for p, q in pairs:
            _rotate(rows, vectors, p, q)
    else:
        raise ArithmeticError(f"no eigenvalues after {SWEEPS_MAX} sweeps")
    order = sorted(range(size), key=lambda index: rows[index][index])
    return [rows[index][index] for index in order], [vectors[index] for index in order]


def _rotate(rows: Matrix, vectors: Matrix, p: int, q: int) -> None:
    """Turn the axes p and q so that rows[p][q] becomes 0."""
    if rows[p][q] == 0.0:  # an earlier rotation of this sweep has done it
        return
    ratio = (rows[q][q] - rows[p][p]) / (2 * rows[p][q])
    tangent = math.copysign(1 / (abs(ratio) + math.hypot(ratio, 1)), ratio)
    cosine = 1 / math.hypot(tangent, 1)
    sine = tangent * cosine
    for row in rows:
        row[p], row[q] = cosine * row[p] - sine * row[q], sine * row[p] + cosine * row[q]
    for table in (rows, vectors):
        at_p, at_q = table[p], table[q]
        table[p] = [cosine * a - sine * b for a, b in zip(at_p, at_q, strict=True)]
        table[q] = [sine * a + cosine * b for a, b in zip(at_p, at_q, strict=True)]


def _symmetric(matrix: Matrix) -> Matrix:
    return [[(matrix[row][column] + matrix[column][row]) / 2 for column in range(len(matrix))] for row in range(len(matrix))]


def _roots(masses: Sequence[float]) -> list[float]:
    return [math.sqrt(mass) for mass in masses for _ in range(3)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _cross(left: Sequence[float], right: Sequence[float]) -> Vector:
    return [left[index - 2] * right[index - 1] - left[index - 1] * right[index - 2] for index in range(3)]
