"""Screenshots of pages of the built site, light and dark, to be looked at.

python -m docs.site.screenshots                      five pages
python -m docs.site.screenshots all                  every page
python -m docs.site.screenshots how-to/memory        that page
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SITE = Path(__file__).parents[2] / "build" / "site"
FOLDER = SITE.parent / "screenshots"
PAGES = ("index", "how-to/index", "reference/api", "reference/strategies", "reference/hardware-profiles")
SCHEMES = {"dark": 0, "light": 1}
"""Colors → the number that Chromium has for them."""
SIZE = "1400,2400"


def screenshot(address: str, scheme: str, browser: str) -> Path:
    """Return a picture of a page in a color scheme."""
    page = address.split("/", 3)[3].removesuffix(".html").replace("/", "-")
    made = FOLDER / f"{page}-{scheme}.png"
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", f"--window-size={SIZE}"]
    flags += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--screenshot={made}"]
    subprocess.run([browser, *flags, "--virtual-time-budget=5000", address], check=True, capture_output=True)
    return made


def pages(names: list[str]) -> list[str]:
    """Return the pages to show: those named, five if none is, or all."""
    if names == ["all"]:
        return sorted(str(page.relative_to(SITE).with_suffix("")) for page in SITE.rglob("*.html"))
    return names or list(PAGES)


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def main() -> None:
    """Make all screenshots and print where they are."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("screenshots need chromium or google-chrome, and neither is on the PATH; install one of them.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    handler = partial(_Silent, directory=SITE)
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for page in pages(sys.argv[1:]):
            for scheme in SCHEMES:
                print(screenshot(f"http://localhost:{server.server_port}/{page}.html", scheme, browser))
        server.shutdown()


if __name__ == "__main__":
    main()
