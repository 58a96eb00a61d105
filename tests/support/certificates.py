"""Certificates for tests, made by the code of `tasuki dev-cert`: good ones, and such as nobody should trust."""

from __future__ import annotations

import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tasuki.cli.dev_cert import Authority, CertificateFiles
from tests.conftest import require

DAY = timedelta(days=1)


class TestAuthority:
    """A CA in a folder, and the certificates that it signs, each in a folder below it."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        require("openssl", shutil.which("openssl") is not None, "certificates are made with it")
        self._folder = folder
        self._files = CertificateFiles(folder)
        self._authority = Authority.of(self._files)

    @property
    def ca(self) -> str:
        return str(self._files.ca)

    def trusted(self) -> ssl.SSLContext:
        """Return the context of a client that was given the CA."""
        return ssl.create_default_context(cafile=self.ca)

    def issue(self, *names: str, begins_days: float = -1, ends_days: float = 30) -> tuple[str, str]:
        """Return (certificate, key) for these names, by default for 127.0.0.1; the validity is in days from now."""
        now = datetime.now(UTC)
        files = CertificateFiles(
            self._folder / f"{'-'.join(names) or 'loopback'}{begins_days:+g}{ends_days:+g}".replace(":", ".")
        )
        if not files.cert.exists():
            self._authority.issue(files, names or ("127.0.0.1",), now + begins_days * DAY, now + ends_days * DAY)
        return str(files.cert), str(files.key)

    def serving(self, *names: str, begins_days: float = -1, ends_days: float = 30) -> ssl.SSLContext:
        """Return the context of a server that shows such a certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(*names, begins_days=begins_days, ends_days=ends_days))
        return context
