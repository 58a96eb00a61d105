#!/usr/bin/env python3
"""The zero-point energy of a small molecule, with Quantum ESPRESSO. Needs pw.x, Python 3.11 or newer, and nothing else.

    python3 zpe.py h2.json --out h2             # from a shell
    tasuki worker … --exec zpe='python3 …/zpe.py'   # as a job: the payload comes on stdin, the results go to $TASUKI_OUT

It relaxes the geometry, moves the atoms a little along each vibration, and takes the frequencies from the change of the forces.
Writes result.json, summary.txt, freqs.csv and meta.json; if it fails, error.json, and exits with the code of that error
(problem.py).
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from espresso import Espresso, Relaxed
from molecule import BOHR_ANGSTROM, Molecule, parse
from problem import Problem
from vibrations import EV_PER_CM1, HARTREE_EV, centred, frequencies_cm1, vibrational_basis, zero_point_ev

DEBIAN_PSEUDOPOTENTIALS = "/usr/share/espresso/pseudo"
KJ_MOL_PER_EV = 96.48533212
RELAX_SHARE = 0.5  # of the progress; how many steps a relaxation takes is not known before
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM

Tell = Callable[[float, str], None]


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, _terminated)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("result.json", "summary.txt", "freqs.csv", "meta.json", "error.json"):
        (out / name).unlink(missing_ok=True)
    started = time.monotonic()
    try:
        molecule = parse(_read(options.payload))
        with tempfile.TemporaryDirectory(prefix="zpe-") as folder:
            espresso = Espresso(molecule, Path(folder), program=options.pw, pseudopotentials=Path(options.pseudo))
            relaxed, frequencies = compute(molecule, espresso, tell)
    except Problem as problem:
        _write(out, "error.json", _as_json(error_of(problem)))
        print(f"{problem.error_code}: {problem.message}", file=sys.stderr)
        if problem.detail:
            print(problem.detail, file=sys.stderr)
        return problem.exit_code
    summary = summary_of(molecule, relaxed, frequencies)
    _write(out, "result.json", _as_json(result_of(molecule, relaxed, frequencies)))
    _write(out, "summary.txt", summary)
    _write(out, "freqs.csv", freqs_csv_of(frequencies))
    _write(out, "meta.json", _as_json(meta_of(relaxed, time.monotonic() - started)))
    print(summary, end="")
    return 0


def compute(molecule: Molecule, espresso: Espresso, tell: Tell) -> tuple[Relaxed, list[float]]:
    """Relax, then the frequencies in cm⁻¹, lowest first, imaginary ones negative."""
    tell(0.0, "relaxing the geometry")
    relaxed = espresso.relax(lambda step: tell(RELAX_SHARE * (1 - 0.8**step), f"relaxing the geometry: step {step}"))
    runs = 2 * len(vibrational_basis(relaxed.positions_bohr, molecule.masses_u))
    done = 0

    def forces_at(positions: list[float]) -> list[float]:
        nonlocal done
        tell(RELAX_SHARE + (1 - RELAX_SHARE) * done / runs, f"displacement {done + 1} of {runs}")
        done += 1
        return espresso.forces_at(positions)

    frequencies = frequencies_cm1(relaxed.positions_bohr, molecule.masses_u, forces_at, molecule.displacement_bohr)
    tell(1.0, "done")
    return relaxed, frequencies


# ---------------------------------------------------------------------------------------------------- what is told


def result_of(molecule: Molecule, relaxed: Relaxed, frequencies: list[float]) -> dict[str, Any]:
    places = [place * BOHR_ANGSTROM for place in centred(relaxed.positions_bohr, molecule.masses_u)]
    return {
        "name": molecule.name,
        "zpe_ev": round(zero_point_ev(frequencies), 6),
        "frequencies_cm1": [round(frequency, 2) for frequency in frequencies if frequency > 0],
        "imaginary_frequencies_cm1": [round(-frequency, 2) for frequency in frequencies if frequency <= 0],
        "energy_ev": round(relaxed.energy_ry * HARTREE_EV / 2, 6),
        "largest_force_ry_bohr": max(abs(force) for force in relaxed.forces_ry_bohr),
        "atoms": [
            {
                "element": element,
                "position_angstrom": [round(place, 6) + 0.0 for place in places[3 * atom : 3 * atom + 3]],
                "mass_u": molecule.masses_u[atom],
            }
            for atom, element in enumerate(molecule.elements)
        ],
        "box_bohr": molecule.box_bohr,
        "ecutwfc_ry": molecule.ecutwfc_ry,
        "ecutrho_ry": molecule.ecutrho_ry,
        "pseudopotentials": molecule.pseudopotentials,
        "unpaired_electrons": molecule.unpaired_electrons,
        "displacement_bohr": molecule.displacement_bohr,
    }


def summary_of(molecule: Molecule, relaxed: Relaxed, frequencies: list[float]) -> str:
    energy_ev = zero_point_ev(frequencies)
    box = " x ".join(f"{side:g}" for side in molecule.box_bohr)
    lines = [
        f"{molecule.name}: zero-point energy {energy_ev:.4f} eV ({energy_ev * KJ_MOL_PER_EV:.2f} kJ/mol)",
        f"Quantum ESPRESSO {relaxed.version}, {molecule.ecutwfc_ry:g}/{molecule.ecutrho_ry:g} Ry, box {box} bohr, "
        f"total energy {relaxed.energy_ry * HARTREE_EV / 2:.4f} eV",
        *(f"mode {mode}: {_shown(frequency)}" for mode, frequency in enumerate(frequencies, 1)),
    ]
    imaginary = sum(frequency <= 0 for frequency in frequencies)
    if imaginary:
        lines.append(
            f"warning: {imaginary} of {len(frequencies)} frequencies imaginary, and not in the zero-point energy: this "
            "geometry is no minimum; start from one of lower symmetry, or raise the cutoffs"
        )
    if not frequencies:
        lines.append("an atom has no vibrations")
    return "\n".join(lines) + "\n"


def freqs_csv_of(frequencies: list[float]) -> str:
    """One line per mode; an imaginary frequency is a negative number, and has no zero-point energy."""
    rows = [
        f"{mode},{frequency:.2f},{max(frequency, 0.0) / 2 * EV_PER_CM1:.6f}\n" for mode, frequency in enumerate(frequencies, 1)
    ]
    return "mode,frequency_cm1,zpe_ev\n" + "".join(rows)


def meta_of(relaxed: Relaxed, took_s: float) -> dict[str, Any]:
    return {
        "worker_hostname": socket.gethostname(),
        "computation_time_seconds": round(took_s, 3),
        "qe_version": relaxed.version,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def error_of(problem: Problem) -> dict[str, Any]:
    return {
        "error_code": problem.error_code,
        "error_message": problem.message,
        "traceback": problem.detail or None,
        "permanent": problem.permanent,
    }


def tell(fraction: float, text: str) -> None:
    """To whoever looks at stderr, and to the worker if there is one."""
    print(f"{fraction:4.0%} {text}", file=sys.stderr, flush=True)
    descriptor = os.environ.get("TASUKI_PROGRESS_FD", "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError):  # a progress that nobody can be told of is no reason to stop
            os.write(int(descriptor), f"progress {fraction:.3f} {text}\n".encode())


def _shown(frequency: float) -> str:
    return f"{frequency:.1f} cm-1" if frequency > 0 else f"{-frequency:.1f}i cm-1"


# ---------------------------------------------------------------------------------------------------- the program


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("payload", nargs="?", default="-", help="file with the molecule as JSON (default: stdin)")
    parser.add_argument(
        "--out", default=os.environ.get("TASUKI_OUT", "out"), help="folder for the results (default: %(default)s)"
    )
    parser.add_argument("--pw", default="pw.x", help="the program (default: %(default)s)")
    parser.add_argument(
        "--pseudo",
        default=os.environ.get("ESPRESSO_PSEUDO", DEBIAN_PSEUDOPOTENTIALS),
        help="folder of the pseudopotentials (default: %(default)s)",
    )
    return parser.parse_args()


def _terminated(number: int, frame: object) -> NoReturn:
    """Raise the signal as an exception, so that pw.x is ended and the scratch folder removed on the way out."""
    raise SystemExit(TERMINATED_EXIT_CODE)


def _read(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise SystemExit(f"the payload cannot be read: {error}") from error


def _as_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write(out: Path, name: str, text: str) -> None:
    (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
