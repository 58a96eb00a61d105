"""Quantum ESPRESSO's pw.x: its input, its program, its output.

Texts are made and read by pure functions; `Espresso` alone starts processes. All that pw.x leaves behind, it leaves in the folder
that `Espresso` was given: links to the pseudopotentials lie there too, so that no path of this machine is in any input.
"""

import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from molecule import Molecule
from problem import (
    QE_NOT_FOUND,
    QE_PSEUDO_MISMATCH,
    QE_PSEUDO_NOT_FOUND,
    QE_RELAX_NOT_CONVERGED,
    QE_RUNTIME_ERROR,
    QE_SCF_NOT_CONVERGED,
    Problem,
)

INPUT = "pw.in"
DETAIL_LINES = 40
STOP_SIGNALS = {signal.SIGTERM}
# One process on one core by default, and no Open MPI daemon or listening socket beside it: this is no cluster.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_MCA_ess_singleton_isolated": "1", "OMPI_MCA_btl": "self"}

ENERGY = re.compile(r"^!\s+total energy\s+=\s+(\S+) Ry", re.MULTILINE)
FORCE = re.compile(r"^\s+atom\s+\d+ type\s+\d+\s+force =\s+(\S+)\s+(\S+)\s+(\S+)$", re.MULTILINE)
FORCES_HEAD, FORCES_END = "Forces acting on atoms (cartesian axes, Ry/au):", "Total force ="
TIMES_HEAD = "     init_run     :"
FINAL_HEAD, FINAL_END = "Begin final coordinates", "End final coordinates"
POSITION = re.compile(r"^[A-Z][a-z]?\d*\s+(\S+)\s+(\S+)\s+(\S+)$", re.MULTILINE)
VERSION = re.compile(r"Program PWSCF v\.(\S+) starts")
CONFLICT = "conflicting values for"  # of pw.x, when the files do not agree on the functional
UPF_ELEMENT = re.compile(r"<PP_HEADER\b(?:[^>]*?\belement=\"|>[^\n]*\n[^\n]*\n)\s*([A-Z][a-z]?)\b", re.IGNORECASE)  # UPF 2, UPF 1
ERROR = re.compile(r"%{20,}\n\s*(Error in routine .*?)\n\s*%{20,}", re.DOTALL)


@dataclass(frozen=True)
class Relaxed:
    """A molecule at rest."""

    energy_ry: float
    positions_bohr: list[float]
    forces_ry_bohr: list[float]
    version: str


class Espresso:
    """pw.x for one molecule, in one folder that is to be removed afterwards."""

    def __init__(self, molecule: Molecule, folder: Path, *, program: str, pseudopotentials: Path) -> None:
        found = shutil.which(program)
        if found is None:
            raise Problem(
                QE_NOT_FOUND,
                f"{program} was not found or may not be executed (PATH is {os.environ.get('PATH', '')}); "
                "install Debian's quantum-espresso, or name the program with --pw",
            )
        link_pseudopotentials(molecule, pseudopotentials, folder)
        self._program = os.path.abspath(found)  # noqa: PTH100  # as it was found: a link may choose what it does by its name
        self._molecule = molecule
        self._folder = folder

    def relax(self, on_step: Callable[[int], None] = lambda step: None) -> Relaxed:
        """Bring the atoms to where no force is left; `on_step` hears of each geometry that was tried."""
        alone = len(self._molecule.elements) == 1
        calculation = "scf" if alone else "relax"
        output = self._run(input_of(self._molecule, self._molecule.positions_bohr, calculation), on_step)
        if not alone:
            check_relaxed(output)
        return Relaxed(
            energy_ry=energy_of(output),
            positions_bohr=self._molecule.positions_bohr if alone else final_positions_of(output, len(self._molecule.elements)),
            forces_ry_bohr=self._forces_of(output),
            version=version_of(output),
        )

    def forces_at(self, positions: list[float]) -> list[float]:
        """The forces at another geometry, which is near the one before: its density is where pw.x starts from."""
        return self._forces_of(self._run(input_of(self._molecule, positions, "scf", from_before=True)))

    def _forces_of(self, output: str) -> list[float]:
        return forces_of(output, len(self._molecule.elements))

    def _run(self, text: str, on_step: Callable[[int], None] = lambda step: None) -> str:
        (self._folder / INPUT).write_text(text)
        environment = {**ENVIRONMENT, **os.environ, "TMPDIR": os.fspath(self._folder)}
        process, lines, steps = None, [], 0
        try:
            # A SIGTERM that comes while pw.x is started waits until its process is known, and then ends it.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                process = subprocess.Popen(
                    [self._program, "-in", INPUT],
                    cwd=self._folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    preexec_fn=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOP_SIGNALS),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if ENERGY.match(line):
                    steps += 1
                    on_step(steps)
            code = process.wait()
        except BaseException:  # we are told to stop: pw.x must not go on without us
            if process is not None:
                process.kill()
                process.wait()
            raise
        output = "".join(lines)
        check_ended(code, output)
        return output


def link_pseudopotentials(molecule: Molecule, source: Path, folder: Path) -> None:
    for element, name in molecule.pseudopotentials.items():
        if not (source / name).is_file():
            raise Problem(
                QE_PSEUDO_NOT_FOUND,
                f"there is no pseudopotential {name} for {element} in {source}; install Debian's quantum-espresso-data, "
                "put the file there, or name another folder with --pseudo",
            )
        # pw.x takes the charge from the file and the mass from us: it would compute a molecule that does not exist.
        found = UPF_ELEMENT.search((source / name).read_text(errors="replace"))
        if found is not None and found[1].capitalize() != element:
            raise Problem(
                QE_PSEUDO_MISMATCH,
                f"the pseudopotential {name} for {element} is one of {found[1].capitalize()}; "
                f"name another file in pseudopotentials.{element}",
            )
        (folder / name).symlink_to((source / name).resolve())


# ---------------------------------------------------------------------------------------------------- what it is told


def input_of(molecule: Molecule, positions: list[float], calculation: str, *, from_before: bool = False) -> str:
    """pw.x's input. `from_before` starts from the density and the wave functions that the run before left in the folder."""
    spin = f"nspin = 2, tot_magnetization = {molecule.unpaired_electrons}" if molecule.unpaired_electrons else "nspin = 1"
    start = ", startingpot = 'file', startingwfc = 'file'" if from_before else ""
    masses = dict(zip(molecule.elements, molecule.masses_u, strict=True))  # pw.x does not use them here, but asks for them
    species = [f"{element} {masses[element]} {name}" for element, name in molecule.pseudopotentials.items()]
    atoms = [
        " ".join([element, *(f"{place:.12f}" for place in positions[3 * atom : 3 * atom + 3])])
        for atom, element in enumerate(molecule.elements)
    ]
    box = [" ".join(str(side if row == column else 0.0) for column in range(3)) for row, side in enumerate(molecule.box_bohr)]
    return f"""&CONTROL
  calculation = '{calculation}', prefix = 'zpe', outdir = '.', pseudo_dir = '.'
  tprnfor = .true., nstep = 100, forc_conv_thr = 1.0d-4, etot_conv_thr = 1.0d-6
/
&SYSTEM
  ibrav = 0, nat = {len(atoms)}, ntyp = {len(species)}, nosym = .true.
  ecutwfc = {molecule.ecutwfc_ry}, ecutrho = {molecule.ecutrho_ry}
  {spin}
/
&ELECTRONS
  conv_thr = 1.0d-10{start}
/
&IONS
  upscale = 1
/
ATOMIC_SPECIES
{_lines(species)}
ATOMIC_POSITIONS bohr
{_lines(atoms)}
CELL_PARAMETERS bohr
{_lines(box)}
K_POINTS gamma
"""


def _lines(texts: list[str]) -> str:
    return "\n".join(texts)


# ---------------------------------------------------------------------------------------------------- what it says


def check_ended(code: int, output: str) -> None:
    """Problem, if pw.x did not do what it was asked to."""
    if "convergence NOT achieved" in output:
        raise Problem(
            QE_SCF_NOT_CONVERGED,
            "the electrons did not reach self-consistency; check the geometry, the cutoffs and unpaired_electrons",
            _end_of(output),
        )
    if "The maximum number of steps has been reached" in output:
        raise _not_relaxed(output)
    if code == 0:
        return
    ended = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    found = ERROR.search(output)
    why = ": " + " ".join(found[1].split()) if found else ""
    if CONFLICT in why:
        raise Problem(QE_PSEUDO_MISMATCH, f"all pseudopotentials must be of one functional; pw.x {ended}{why}", _end_of(output))
    raise Problem(QE_RUNTIME_ERROR, f"pw.x {ended}{why}", _end_of(output))


def check_relaxed(output: str) -> None:
    """Problem, if the relaxation gave up. pw.x then shows final coordinates all the same, and may exit with 0."""
    if "bfgs converged" not in output:
        raise _not_relaxed(output)


def energy_of(output: str) -> float:
    """The last total energy, in Ry."""
    return _numbers(ENERGY.findall(output)[-1:], 1, "a total energy", output)[0]


def forces_of(output: str, atoms: int) -> list[float]:
    """The last forces, in Ry/bohr."""
    last = output.partition(FORCES_HEAD)[2].rpartition(FORCES_HEAD)[2].partition(FORCES_END)[0]
    found = [part for force in FORCE.findall(last) for part in force]
    return _numbers(found, 3 * atoms, f"the forces on {atoms} atoms", output)


def final_positions_of(output: str, atoms: int) -> list[float]:
    """Return the positions at which the relaxation ended, in bohr."""
    final = output.partition(FINAL_HEAD)[2].partition(FINAL_END)[0]
    found = [place for position in POSITION.findall(final) for place in position]
    return _numbers(found, 3 * atoms, f"the final positions of {atoms} atoms", output)


def version_of(output: str) -> str:
    found = VERSION.search(output)
    return found[1] if found else "unknown"


def _not_relaxed(output: str) -> Problem:
    message = "the geometry did not come to rest; start from a better one, or raise ecutwfc_ry and ecutrho_ry"
    return Problem(QE_RELAX_NOT_CONVERGED, message, _end_of(output))


def _numbers(texts: list[str], count: int, what: str, output: str) -> list[float]:
    """Fortran prints stars for a number that does not fit, and NaN for one that is none."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise Problem(QE_RUNTIME_ERROR, f"pw.x ended without an error, but did not print {what}", _end_of(output))
    return numbers


def _end_of(output: str) -> str:
    told = output.partition(TIMES_HEAD)[0]
    return "\n".join([line for line in told.splitlines() if line.strip()][-DETAIL_LINES:])
