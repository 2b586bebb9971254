"""Pictures of a page that `plait report` wrote: wide and light, narrow and dark.  Needs Chromium or Chrome.

.venv/bin/python docs/figures/screenshots.py runs/demo/report.html --name demo --whole
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

HERE = Path(__file__).resolve().parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDE, NARROW = 1180, 460  # windows, in pixels
GAP, TOP = 12, 1240
TALLEST = 9000
COLOURS = 128  # of the files, which are flat drawings


def screenshot(browser: str, page: Path, width: int, dark: bool) -> Image.Image:
    """The whole page, as high as it is."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},{TALLEST}",
            f"--screenshot={picture}",
            page.resolve().as_uri(),
        ]
        subprocess.run(command, check=True, timeout=180, stderr=subprocess.DEVNULL)
        whole = Image.open(picture).convert("RGB")
    paper = Image.new("RGB", whole.size, whole.getpixel((0, 0)))
    box = ImageChops.difference(whole, paper).getbbox()
    assert box is not None, "the page is empty"
    return whole.crop((0, 0, whole.width, min(box[3] + 24, whole.height)))


def beside(wide: Image.Image, narrow: Image.Image) -> Image.Image:
    """The top of both, as high as each other."""
    both = Image.new("RGB", (wide.width + GAP + narrow.width, TOP), "#888888")
    both.paste(wide.crop((0, 0, wide.width, TOP)), (0, 0))
    both.paste(narrow.crop((0, 0, narrow.width, TOP)), (wide.width + GAP, 0))
    return both


def main() -> None:
    """Write NAME.png, the top of the page wide and light beside narrow and dark, and perhaps NAME-whole.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, help="HTML file from `plait report`")
    parser.add_argument("--name", required=True, help="of the files")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write into")
    parser.add_argument("--whole", action="store_true", help="also write the whole page, wide and light")
    given = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    if not given.page.is_file():
        sys.exit(f"{given.page} does not exist. Write it with `plait report RUN -o {given.page}`.")
    wide = screenshot(browser, given.page, WIDE, dark=False)
    pictures = {given.name: beside(wide, screenshot(browser, given.page, NARROW, dark=True))}
    if given.whole:
        pictures[f"{given.name}-whole"] = wide
    for name, picture in pictures.items():
        path = given.out / f"{name}.png"
        picture.quantize(COLOURS).save(path, optimize=True)
        print(f"wrote {path}: {picture.width} x {picture.height}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
