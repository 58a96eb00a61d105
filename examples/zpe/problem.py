"""Problems by name: the error codes that a job's owner sees, and the exit code of each."""

INVALID_PAYLOAD = "INVALID_PAYLOAD"
QE_NOT_FOUND = "QE_NOT_FOUND"
QE_PSEUDO_NOT_FOUND = "QE_PSEUDO_NOT_FOUND"
QE_PSEUDO_MISMATCH = "QE_PSEUDO_MISMATCH"
QE_RUNTIME_ERROR = "QE_RUNTIME_ERROR"
QE_SCF_NOT_CONVERGED = "QE_SCF_NOT_CONVERGED"
QE_RELAX_NOT_CONVERGED = "QE_RELAX_NOT_CONVERGED"

EXIT_CODES = {
    INVALID_PAYLOAD: 2,
    QE_PSEUDO_MISMATCH: 2,
    QE_SCF_NOT_CONVERGED: 3,
    QE_RELAX_NOT_CONVERGED: 3,
    QE_NOT_FOUND: 69,
    QE_PSEUDO_NOT_FOUND: 69,
    QE_RUNTIME_ERROR: 70,
}
# The same molecule would fail in the same way everywhere. What this machine lacks another one may have.
PERMANENT_EXIT_CODES = frozenset({2, 3})


class Problem(Exception):
    """Why there is no zero-point energy."""

    def __init__(self, error_code: str, message: str, detail: str = "") -> None:
        """`detail` is for those who know Quantum ESPRESSO: the end of what it wrote."""
        super().__init__(message)
        self.error_code = error_code
        self.message = message
        self.detail = detail

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.error_code]

    @property
    def permanent(self) -> bool:
        return self.exit_code in PERMANENT_EXIT_CODES
