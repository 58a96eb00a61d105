"""The input of examples/zpe for pw.x, and its reading of the answers that pw.x 6.7 once gave."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.shape.source import ROOT

sys.path.insert(0, os.fspath(ROOT / "examples" / "zpe"))

from espresso import (
    check_ended,
    check_relaxed,
    energy_of,
    final_positions_of,
    forces_of,
    input_of,
    link_pseudopotentials,
    version_of,
)
from molecule import Molecule
from problem import Problem

RELAXED = """
     Program PWSCF v.6.7MaX starts on 15Nov2026 at 11:54:43

     total energy              =      -2.33244745 Ry
!    total energy              =      -2.33244746 Ry
     estimated scf accuracy    <          4.4E-13 Ry
     convergence has been achieved in   5 iterations

     Forces acting on atoms (cartesian axes, Ry/au):

     atom    1 type  1   force =     0.00022181   -0.00000000    0.00000000
     atom    2 type  1   force =    -0.00022181    0.00000000   -0.00000000

     Total force =     0.000314     Total SCF correction =     0.000000

ATOMIC_POSITIONS (bohr)
H             6.2899213448        7.0000000005        6.9999999999
H             7.7100786552        6.9999999995        7.0000000001

!    total energy              =      -2.33244750 Ry

     Forces acting on atoms (cartesian axes, Ry/au):

     atom    1 type  1   force =    -0.00000384    0.00000000   -0.00000000
     atom    2 type  1   force =     0.00000384   -0.00000000    0.00000000

     Total force =     0.000005     Total SCF correction =     0.000000

     bfgs converged in   4 scf cycles and   3 bfgs steps
     End of BFGS Geometry Optimization

     Final energy   =      -2.3324474976 Ry
Begin final coordinates

ATOMIC_POSITIONS (bohr)
H             6.2899213449        7.0000000005        6.9999999999
H             7.7100786553        6.9999999995        7.0000000001
End final coordinates

     init_run     :      0.17s CPU      0.43s WALL (       1 calls)
   JOB DONE.
"""
STOPPED = """
     estimated scf accuracy    <       0.00130950 Ry
     End of self-consistent calculation
     convergence NOT achieved after   2 iterations: stopping

     init_run     :      0.17s CPU      0.35s WALL (       1 calls)
   JOB DONE.
STOP 2
"""
RESTLESS = """
     new trust radius        =       0.0044964865 bohr
     The maximum number of steps has been reached.
     End of BFGS Geometry Optimization
STOP 3
"""
CRASHED = """
 %%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%
     Error in routine readpp (1):
     file ./H.pbe-nix.UPF not found
 %%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%%

     stopping ...
"""
MIXED = CRASHED.replace("readpp (1)", "set_dft_from_name (3)").replace(
    "file ./H.pbe-nix.UPF not found", "conflicting values for icorr"
)
HYDROXYL = Molecule(
    name="OH",
    elements=["O", "H"],
    positions_bohr=[0.0, 0.0, 0.0, 0.0, 0.25, 1.5],
    masses_u=[15.999, 1.008],
    box_bohr=[12.0, 13.0, 14.0],
    pseudopotentials={"O": "O.UPF", "H": "H.UPF"},
    ecutwfc_ry=46.0,
    ecutrho_ry=230.0,
    unpaired_electrons=1,
)


def problem_of(code: int, output: str) -> Problem:
    with pytest.raises(Problem) as caught:
        check_ended(code, output)
    return caught.value


def test_the_last_energy_the_last_forces_and_the_final_positions_count() -> None:
    assert energy_of(RELAXED) == -2.33244750
    assert forces_of(RELAXED, 2) == [-0.00000384, 0, 0, 0.00000384, 0, 0]
    assert final_positions_of(RELAXED, 2) == [6.2899213449, 7.0000000005, 6.9999999999, 7.7100786553, 6.9999999995, 7.0000000001]
    assert version_of(RELAXED) == "6.7MaX"


def test_a_run_that_went_well_is_no_problem() -> None:
    check_ended(0, RELAXED)
    check_relaxed(RELAXED)


@pytest.mark.parametrize(
    "output",
    [
        "",
        RELAXED.replace("atom    2 type  1", "atom"),
        RELAXED.replace("0.00000384", "**********"),
        RELAXED.replace("0.00000384", "       NaN"),
    ],
)
def test_forces_that_are_not_all_there_are_a_problem(output: str) -> None:
    with pytest.raises(Problem, match="did not print the forces on 2 atoms") as caught:
        forces_of(output, 2)

    assert caught.value.error_code == "QE_RUNTIME_ERROR"
    assert not caught.value.permanent


def test_an_output_without_energy_or_positions_is_a_problem() -> None:
    with pytest.raises(Problem, match="did not print a total energy"):
        energy_of("")
    with pytest.raises(Problem, match="did not print the final positions of 2 atoms"):
        final_positions_of(RELAXED.replace("Begin final", "Begin"), 2)


def test_electrons_that_do_not_converge() -> None:
    problem = problem_of(2, STOPPED)

    assert (problem.error_code, problem.exit_code, problem.permanent) == ("QE_SCF_NOT_CONVERGED", 3, True)
    assert problem.detail.endswith("convergence NOT achieved after   2 iterations: stopping")


def test_atoms_that_do_not_come_to_rest() -> None:
    problem = problem_of(3, RESTLESS)

    assert (problem.error_code, problem.exit_code, problem.permanent) == ("QE_RELAX_NOT_CONVERGED", 3, True)


def test_a_relaxation_that_gave_up_shows_final_coordinates_and_is_a_problem_all_the_same() -> None:
    output = RELAXED.replace("bfgs converged in", "bfgs failed after")

    check_ended(0, output)
    with pytest.raises(Problem) as caught:
        check_relaxed(output)

    assert caught.value.error_code == "QE_RELAX_NOT_CONVERGED"


@pytest.mark.parametrize(
    ("code", "output", "message"),
    [
        (1, "", "pw.x exited with code 1"),
        (1, CRASHED, "pw.x exited with code 1: Error in routine readpp (1): file ./H.pbe-nix.UPF not found"),
        (-9, RELAXED, "pw.x was killed by signal 9"),
    ],
)
def test_a_crash_tells_what_pw_said(code: int, output: str, message: str) -> None:
    problem = problem_of(code, output)

    assert (problem.error_code, problem.message) == ("QE_RUNTIME_ERROR", message)
    assert (problem.exit_code, problem.permanent) == (70, False)


def test_pseudopotentials_of_different_functionals_are_never_tried_again() -> None:
    problem = problem_of(1, MIXED)

    assert (problem.error_code, problem.permanent) == ("QE_PSEUDO_MISMATCH", True)
    assert "conflicting values for icorr" in problem.message
    assert "of one functional" in problem.message


def test_the_input_of_a_relaxation() -> None:
    text = input_of(HYDROXYL, HYDROXYL.positions_bohr, "relax")

    assert "calculation = 'relax'" in text
    assert "nspin = 2, tot_magnetization = 1" in text
    assert "ecutwfc = 46.0, ecutrho = 230.0" in text
    assert "startingpot" not in text
    cards = text.partition("ATOMIC_SPECIES\n")[2]
    assert cards.splitlines() == [
        "O 15.999 O.UPF",
        "H 1.008 H.UPF",
        "ATOMIC_POSITIONS bohr",
        "O 0.000000000000 0.000000000000 0.000000000000",
        "H 0.000000000000 0.250000000000 1.500000000000",
        "CELL_PARAMETERS bohr",
        "12.0 0.0 0.0",
        "0.0 13.0 0.0",
        "0.0 0.0 14.0",
        "K_POINTS gamma",
    ]


def test_a_displacement_starts_from_the_density_before() -> None:
    text = input_of(HYDROXYL, [0.0] * 6, "scf", from_before=True)

    assert "calculation = 'scf'" in text
    assert "startingpot = 'file', startingwfc = 'file'" in text


def test_a_pseudopotential_that_is_not_there_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "O.UPF").touch()
    (tmp_path / "work").mkdir()

    with pytest.raises(Problem) as caught:
        link_pseudopotentials(HYDROXYL, tmp_path, tmp_path / "work")

    assert caught.value.message.startswith(f"there is no pseudopotential H.UPF for H in {tmp_path}; install Debian's")
    assert (caught.value.error_code, caught.value.exit_code, caught.value.permanent) == ("QE_PSEUDO_NOT_FOUND", 69, False)


@pytest.mark.parametrize(
    "header",
    [
        '<UPF version="2.0.1">\n<PP_INFO>for H</PP_INFO>\n<PP_HEADER\n generated="by hand"\n element="N "\n functional="PBE"/>\n',
        "<PP_INFO>\nfor H\n</PP_INFO>\n<PP_HEADER>\n  0  Version\n  N      Element\n   US    Ultrasoft\n</PP_HEADER>\n",
    ],
    ids=["UPF 2", "UPF 1"],
)
def test_a_pseudopotential_of_another_element_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "O.UPF").write_text(header.replace('"N "', '"O"').replace("  N  ", "  O  "))
    (tmp_path / "H.UPF").write_text(header)
    (tmp_path / "work").mkdir()

    with pytest.raises(Problem) as caught:
        link_pseudopotentials(HYDROXYL, tmp_path, tmp_path / "work")

    assert caught.value.message == "the pseudopotential H.UPF for H is one of N; name another file in pseudopotentials.H"
    assert (caught.value.error_code, caught.value.exit_code, caught.value.permanent) == ("QE_PSEUDO_MISMATCH", 2, True)
