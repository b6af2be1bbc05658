"""Make the pictures of the documentation from real runs in JupyterLab and Chromium.

    python tests/tools/moving_picture.py demo
    python tests/tools/moving_picture.py demo-dark
    python tests/tools/moving_picture.py run
    python tests/tools/moving_picture.py finish

Needs the extras test, lab and browser, and Chromium. `demo` writes notebooks/demo.gif (under 3 MB),
`demo-dark` the same in JupyterLab's dark theme, notebooks/demo-dark.gif: a cell trains on two ranks
and fails at a misspelt name, the name is corrected, and the cell runs
again. `run` writes notebooks/run.png: the board of eight ranks, one of which has a slow loader.
`finish` writes notebooks/_static/gallery/steering.gif: the learning rate of a run is lowered by a
slider, then the run is finished by a button, and its model is used.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.paths import NOTEBOOKS
from tests.support.waiting import wait_until
from tests.ui.browser.conftest import FLAGS, Page, _chromium, _end, _start

WINDOW = {"width": 1000, "height": 1165}
FRAME_S = 0.125
COLOURS = 128
MOST_BYTES = 3_000_000

PREPARE = """\
%load_ext nbtrain
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

x = torch.randn(15_000, 20)
y = (x.sum(1) > 0).long()
model = torch.nn.Linear(20, 2)"""

TRAIN = """\
%%distributed -n 2
def train(model, epochs=3, lr=0.01):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accuracy = (model(x).argmax(1) == labls).float().mean()
    return accuracy.item()"""

EIGHT = """\
%load_ext nbtrain
import time, torch, nbtrain
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, TensorDataset

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
test_set = TensorDataset(images[1440:], labels[1440:])

class Train(Dataset):
    read = 0

    def __len__(self):
        return 1440

    def __getitem__(self, index):
        self.read += 1
        if nbtrain.rank() == 5 and 480 < self.read < 760:  # of 180 samples in an epoch
            time.sleep(0.06)
        return images[index], labels[index]

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))"""

ON_EIGHT = """\
%%distributed -n 8
def train(model, epochs=6):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(Train(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)  # as a larger model would take
        with torch.no_grad():
            logits = model(images[1440:])
        val_loss = torch.nn.functional.cross_entropy(logits, labels[1440:])
        accuracy = (logits.argmax(1) == labels[1440:]).float().mean()
        nbtrain.log(val_loss=val_loss, accuracy=accuracy)"""

LONG = (
    TRAIN.replace("epochs=3, lr=0.01", "epochs=200")
    .replace("lr=lr", "lr=0.05")
    .replace(
        """
        accuracy = (model(x).argmax(1) == labls).float().mean()
    return accuracy.item()""",
        "",
    )
)

LOOK = "(model(x).argmax(1) == y).float().mean()"


class Film:
    """Frames of a page, each with the seconds for which it is shown."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.notebook = page.locator(".jp-NotebookPanel-notebook")
        self.top: Any = None
        """The cell that stays at the top of the picture."""
        self.frames: list[Image.Image] = []
        self.seconds: list[float] = []

    def take(self, seconds: float = FRAME_S) -> None:
        """Take a frame; one that equals the last prolongs it."""
        if self.top is not None:
            self.top.evaluate("cell => cell.scrollIntoView({block: 'start'})")
        clip = self.notebook.bounding_box()
        shot = Image.open(io.BytesIO(self.page.screenshot(clip=clip))).convert("RGB")
        if self.frames and shot.tobytes() == self.frames[-1].tobytes():
            self.seconds[-1] += seconds
        else:
            self.frames.append(shot)
            self.seconds.append(seconds)

    def until(self, text: str, limit: float = 60) -> None:
        """Take frames until the page shows a text, as fast as it was."""
        end = time.monotonic() + limit
        while not self.page.get_by_text(text).first.is_visible():
            began = time.monotonic()
            assert began < end, text
            self.take()
            self.seconds[-1] += min(0.2, time.monotonic() - began) - FRAME_S
            time.sleep(max(0, FRAME_S - (time.monotonic() - began)))

    def record(self, seconds: float) -> None:
        """Take frames for a time."""
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            self.take()
            self.seconds[-1] += min(0.2, time.monotonic() - began) - FRAME_S
            time.sleep(max(0, FRAME_S - (time.monotonic() - began)))

    def save(self, path: Path, poster: int) -> None:
        """Write the GIF, with one palette for all frames; it begins at the frame `poster`.

        The first frame is what a page shows until it moves, and a print.
        """
        self.frames = self.frames[poster:] + self.frames[:poster]
        self.seconds = self.seconds[poster:] + self.seconds[:poster]
        width, height = self.frames[0].size
        sample = Image.new("RGB", (width, height * 4))
        for place in range(4):
            index = (len(self.frames) - 1) * place // 3
            sample.paste(self.frames[index], (0, height * place))
        palette = sample.quantize(COLOURS, dither=Image.Dither.NONE)
        drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames]
        times = [max(20, round(1000 * seconds)) for seconds in self.seconds]
        drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=times, loop=0)
        size = path.stat().st_size
        print(f"{path.name}: {sum(times) / 1000:.1f} s, {len(drawn)} frames, {size:,} bytes")
        assert size < MOST_BYTES


def perform(notebook: Page) -> tuple[Film, int]:
    """Run the cells as a person would, and film it; return the frame of the trained model, too."""
    page, film = notebook.page, Film(notebook.page)
    notebook.wait_for_kernel()
    notebook.command("application:toggle-left-area")
    page.locator("#jp-left-stack").wait_for(state="hidden")
    # By their text: JupyterLab takes cells that are out of sight off the page.
    prepare, train = (page.locator(".jp-CodeCell", has_text=t) for t in ("%load_ext", "%%dis"))
    prepare.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    wait_until(lambda: "[1]" in prepare.inner_text(), timeout=60)
    time.sleep(4)  # torch's modules are imported while the kernel is idle, as for whoever reads on
    film.take(1)
    page.keyboard.press("Shift+Enter")
    film.top = train
    film.until("NameError: name 'labls' is not defined")
    film.take(2.5)
    line = train.locator(".cm-line", has_text="labls")
    line.scroll_into_view_if_needed()
    line.click()
    for key in ("End", *["ArrowLeft"] * len(").float().mean()"), "Control+Shift+ArrowLeft"):
        page.keyboard.press(key)
    film.take(0.5)
    page.keyboard.type("y")
    film.take(0.8)
    page.keyboard.press("Shift+Enter")
    film.until("succeeded")
    film.take(1.5)
    trained = len(film.frames) - 1
    film.top = None
    page.keyboard.press("Shift+Enter")
    film.until("tensor(0.9")
    film.take(2.5)
    return film, trained


def photograph(notebook: Page) -> None:
    """Train on eight ranks twice, and take the picture of the second board while a rank is slow."""
    notebook.wait_for_kernel()
    notebook.command("application:toggle-left-area")
    notebook.run_all()
    page = notebook.page
    page.get_by_text("rank 5 waits for data").first.wait_for(timeout=180_000)
    time.sleep(6)
    board = page.locator(".jp-OutputArea-output").last
    board.scroll_into_view_if_needed()
    board.screenshot(path=NOTEBOOKS / "run.png")


def demo(notebook: Page) -> None:
    """Film the cells of the README."""
    film, trained = perform(notebook)
    film.save(NOTEBOOKS / "demo.gif", trained)


def demo_in_the_dark(notebook: Page) -> None:
    """Film them in the dark theme."""
    notebook.command("apputils:change-theme", theme="JupyterLab Dark")
    notebook.page.locator("body[data-jp-theme-light=false]").wait_for(state="attached")
    film, trained = perform(notebook)
    film.save(NOTEBOOKS / "demo-dark.gif", trained)


def finish(notebook: Page) -> None:
    """Lower the learning rate of a run by a slider, and finish the run by a button."""
    page, film = notebook.page, Film(notebook.page)
    notebook.wait_for_kernel()
    notebook.command("application:toggle-left-area")
    page.locator("#jp-left-stack").wait_for(state="hidden")
    prepare, train = (page.locator(".jp-CodeCell", has_text=t) for t in ("%load_ext", "%%dis"))
    prepare.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    wait_until(lambda: "[1]" in prepare.inner_text(), timeout=60)
    time.sleep(4)  # as in `perform`
    page.keyboard.press("Shift+Enter")
    film.top = train
    film.until("Finish")
    film.record(4)
    page.get_by_role("button", name="Settings").click()
    film.record(1.5)
    handle = page.locator(".noUi-handle").first
    box = handle.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for step in range(1, 11):
        page.mouse.move(x - 5 * step, y)
        film.record(0.1)
    page.mouse.up()
    film.record(4)
    poster = len(film.frames) - 1
    page.get_by_role("button", name="Settings").click()
    film.record(1)
    page.get_by_role("button", name="Finish").click()
    film.until("succeeded")
    film.take(2)
    film.top = None
    page.locator(".jp-CodeCell", has_text="argmax").locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    film.until("tensor(0.9")
    film.take(2.5)
    film.save(NOTEBOOKS / "_static" / "gallery" / "steering.gif", poster)


PICTURES = {
    "demo": (demo, [PREPARE, TRAIN, LOOK], WINDOW),
    "demo-dark": (demo_in_the_dark, [PREPARE, TRAIN, LOOK], WINDOW),
    "finish": (finish, [PREPARE, LONG, LOOK], WINDOW),
    "run": (photograph, [EIGHT, ON_EIGHT], {"width": 1280, "height": 1100}),
}


def main(name: str) -> None:
    """Start a server and a browser, make a picture, and end both."""
    make, cells, window = PICTURES[name]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        process, server = _start("lab", Path(folder))
        try:
            wait_until(lambda: _answers(server), timeout=60)
            server.write("demo.ipynb", cells)
            browser = playwright.chromium.launch(executable_path=_chromium(), args=FLAGS)
            page = Page(browser.new_page(viewport=window), server, "demo.ipynb")
            page.page.set_default_timeout(60_000)
            page.open()
            make(page)
            browser.close()
        finally:
            _end(process)


def _answers(server: Any) -> bool:
    try:
        return bool(server.ask("api/status"))
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
