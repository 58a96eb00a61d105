"""Draw what `tasuki demo` prints as a picture of a terminal: python scripts/draw_demo.py writes docs/demo.svg."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"
COLUMNS = 104
CHARACTER_PX, LINE_PX, MARGIN_PX = 7.8, 19, 16
DEATH, END, COMMAND = "#f7768e", "#9ece6a", "#7aa2f7"
TEXT, GROUND = "#c0caf5", "#1a1b26"


def colour(line: str) -> str:
    """Return the colour of a line: what is killed, what ends well, what was typed."""
    if line.startswith("$"):
        return COMMAND
    return DEATH if "SIGKILL" in line else END if "exactly one recorded finish" in line or "without a run" in line else TEXT


def drawn(output: str) -> str:
    """Return the picture."""
    lines: list[tuple[str, str]] = [(colour("$"), "$ tasuki demo")]
    for line in output.strip("\n").splitlines():
        pieces = textwrap.wrap(line, COLUMNS, subsequent_indent=" " * 9) or [""]
        lines += [(colour(line), piece) for piece in pieces]
    width, height = COLUMNS * CHARACTER_PX + 2 * MARGIN_PX, len(lines) * LINE_PX + 2 * MARGIN_PX
    texts = []
    for number, (paint, line) in enumerate(lines):
        place = f'x="{MARGIN_PX}" y="{MARGIN_PX + LINE_PX * (number + 0.75):g}"'
        texts.append(f'<text {place} fill="{paint}" xml:space="preserve">{escape(line)}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">',
            f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>',
            *texts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    done = subprocess.run([sys.executable, "-m", "tasuki", "demo"], stdout=subprocess.PIPE, text=True, check=True)
    PICTURE.write_text(drawn(done.stdout), encoding="utf-8")
