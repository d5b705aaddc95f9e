"""Take the pictures of the README that need a browser or a terminal screen: the page of `report`, and `browse`.

`make pictures` writes docs/pictures. The page needs chromium and chromedriver. Both pictures show a model of twelve
layers that is made here, with an outlier, a NaN and an infinity.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pictures
import shown  # adds the repository to the path of modules

TARGET = "model.safetensors"
#: The tensor that both pictures show.
OUTLIER = "model.layers.7.self_attn.v_proj.weight"
PAGE_SIZE = (1080, 1180)
#: Quality of the WebP picture, per cent.
PAGE_QUALITY = 19
SCREEN_SIZE = (100, 26)


def main() -> None:
    """Write every picture."""
    with model_folder():
        for theme in pictures.THEMES:
            (pictures.FOLDER / f"browse-{theme}.svg").write_text(draw_browse(theme), "utf-8")
        for theme, picture in take_page().items():
            (pictures.FOLDER / f"page-{theme}.webp").write_bytes(picture)


@contextlib.contextmanager
def model_folder() -> Iterator[None]:
    """Run in a temporary folder with the model."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write_model()
            yield
        finally:
            os.chdir(before)


def write_model() -> None:
    """Write a model of twelve layers, with an outlier, a NaN and an infinity."""
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.RandomState(0)  # numpy never changes the numbers of this generator

    def draw(*shape: int) -> np.ndarray:
        return random.randn(*shape).astype(np.float32) * np.float32(0.02)

    tensors = {"model.embed_tokens.weight": draw(4000, 64)}
    for layer in range(12):
        start = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            tensors[f"{start}.self_attn.{name}_proj.weight"] = draw(64, 64)
        for name, shape in (("gate", (256, 64)), ("up", (256, 64)), ("down", (64, 256))):
            tensors[f"{start}.mlp.{name}_proj.weight"] = draw(*shape)
        tensors[f"{start}.input_layernorm.weight"] = np.ones(64, np.float32)
    tensors["model.norm.weight"] = np.ones(64, np.float32)
    tensors["lm_head.weight"] = draw(4000, 64)
    tensors[OUTLIER] *= 30
    tensors["model.layers.2.input_layernorm.weight"][5] = np.nan
    tensors["model.layers.9.mlp.up_proj.weight"][1, 3] = np.inf
    save_file(tensors, TARGET, metadata={"format": "pt"})


# --- browse -----------------------------------------------------------------------------------------------------------


def draw_browse(theme: str) -> str:
    """Return the SVG of the screen with the cursor on the outlier, after the statistics were read."""
    from rich.console import Console

    width, height = SCREEN_SIZE
    console = Console(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(asyncio.run(_run_browse()))
    return pictures.export(console, theme, "browse-")


async def _run_browse() -> object:
    from statecli.browse.app import Browser
    from statecli.browse.peek import Versions
    from statecli.browse.screen_state import ScreenModel
    from statecli.targets.load import read_checkpoint

    app = Browser(ScreenModel(read_checkpoint(TARGET), {}), Versions({}), read_checkpoint)
    async with app.run_test(size=SCREEN_SIZE) as pilot:
        for keys in (["S"], ["L"], ["enter"], ["left_square_bracket"]):
            await pilot.press(*keys)
            while app._reader.is_busy or app._progress:
                await pilot.pause(0.02)
        await pilot.pause(0.5)  # the cursor rests, and the histogram is read
        return app.screen._compositor.render_update(full=True, screen_stack=app._background_screens)


# --- the page ---------------------------------------------------------------------------------------------------------


def take_page() -> dict[str, bytes]:
    """Return a WebP picture of the page for each theme."""
    from tests.render.browser import CHROMEDRIVER, CHROMIUM, Browser

    if CHROMIUM is None or CHROMEDRIVER is None:
        sys.exit("install chromium and chromedriver (Debian: chromium, chromium-driver)")
    page = Path("report.html").resolve()
    command = [sys.executable, "-m", "statecli", "report", TARGET, "--spectra", "-o", page]
    environment = {**os.environ, "PYTHONPATH": str(shown.ROOT)}
    subprocess.run(command, check=True, env=environment)  # noqa: S603 - our own command
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(profile)
        try:
            return {theme: _take(browser, page, theme) for theme in pictures.THEMES}
        finally:
            browser.close()


def _take(browser: object, page: Path, theme: str) -> bytes:
    width, height = PAGE_SIZE
    browser.show(page, width=width, height=height, scheme=theme)
    browser.run("location.hash = arguments[0]", f"tensor={OUTLIER}")
    browser.wait("setTimeout(() => { scrollTo(0, 0); setTimeout(done, 300); }, 200)")
    picture = browser.devtools("Page.captureScreenshot", format="webp", quality=PAGE_QUALITY)
    return base64.b64decode(picture["data"])


if __name__ == "__main__":
    main()
