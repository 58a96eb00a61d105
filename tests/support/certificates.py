"""Certificates for tests, made by the code of `tasuki dev-cert`: good ones, and such as nobody should trust."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tasuki.net.dev_certificates import Authority, CertificateFiles
from tests.conftest import require

DAY = timedelta(days=1)


class TestAuthority:
    """A CA in a folder, and the certificates that it signs, each in a folder below it."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        require("openssl", shutil.which("openssl") is not None, "certificates are made with it")
        self._folder = folder
        self._files = CertificateFiles.in_folder(folder)
        self._authority = Authority.of(self._files)

    @property
    def ca(self) -> str:
        return str(self._files.ca)

    def trusted(self) -> ssl.SSLContext:
        """Return the context of a client that was given the CA."""
        return ssl.create_default_context(cafile=self.ca)

    def issue(self, *names: str, begins_days: float = -1, ends_days: float = 30, for_nodes: bool = False) -> tuple[str, str]:
        """Return (certificate, key) for these names, by default for 127.0.0.1; the validity is in days from now."""
        now = datetime.now(UTC)
        files = CertificateFiles.in_folder(
            self._folder / f"{'-'.join(names) or 'loopback'}{begins_days:+g}{ends_days:+g}".replace(":", ".")
        )
        if not files.cert.exists():
            begins, ends = now + begins_days * DAY, now + ends_days * DAY
            self._authority.issue(files, names or ("127.0.0.1",), begins, ends, for_nodes=for_nodes)
        return str(files.cert), str(files.key)

    def revoke(self, cert: str, path: Path, *, ends_days: float = 30) -> None:
        """Write a list of revoked certificates that has this one, and that ends so many days from now."""
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            settings = ("database = issued", "crlnumber = number", "default_md = sha256")
            Path(folder, "config").write_text("\n".join(("[ca]", "default_ca = here", "[here]", *settings, "")))
            Path(folder, "issued").touch()
            Path(folder, "number").write_text("01\n")
            files = self._files
            signer = ("openssl", "ca", "-config", "config", "-cert", files.ca.resolve(), "-keyfile", files.ca_key.resolve())
            now = datetime.now(UTC)
            times = [f"{now + days * DAY:%Y%m%d%H%M%SZ}" for days in (min(0, ends_days - 1), ends_days)]
            listed = ("-gencrl", "-crl_lastupdate", times[0], "-crl_nextupdate", times[1], "-out", "list")
            for arguments in (("-revoke", Path(cert).resolve()), listed):
                subprocess.run([*signer, *arguments], cwd=folder, check=True, capture_output=True)
            Path(folder, "list").replace(path)

    def serving(self, *names: str, begins_days: float = -1, ends_days: float = 30) -> ssl.SSLContext:
        """Return the context of a server that shows such a certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(*names, begins_days=begins_days, ends_days=ends_days))
        return context
