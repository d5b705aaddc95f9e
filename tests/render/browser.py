"""A real Chromium, driven over the WebDriver protocol."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run --hide-scrollbars --host-resolver-rules=MAP * ~NOTFOUND"
)
#: Keys of the WebDriver standard, 17.4.2.
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Left": "\ue012", "Up": "\ue013", "Right": "\ue014", "Down": "\ue015"}


class Browser:
    """A session of chromedriver; `folder` holds the profile."""

    def __init__(self, folder):
        self.driver = subprocess.Popen(
            [CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        words = next(line for line in self.driver.stdout if "started successfully" in line).split()
        self.connection = http.client.HTTPConnection("127.0.0.1", int(words[-1].rstrip(".")), timeout=60)
        self.path = "/session"
        flags = [f"--{flag}" for flag in FLAGS.removeprefix("--").split(" --")]
        chrome = {"binary": CHROMIUM, "args": [*flags, f"--user-data-dir={folder}"]}
        wishes = {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        created = self.post("", capabilities={"alwaysMatch": wishes})
        self.path = f"/session/{created['sessionId']}"

    def post(self, path, **body):
        """Return the value of a command's answer."""
        self.connection.request("POST", self.path + path, json.dumps(body))
        answer = json.load(self.connection.getresponse())["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def devtools(self, command, **parameters):
        return self.post("/goog/cdp/execute", cmd=command, params=parameters)

    def show(self, page, *, width=1280, height=900, scheme="light", media=""):
        """Open a file in a window of this size."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", media=media, features=features)
        self.post("/url", url=page.as_uri())

    def run(self, script, *args):
        """Return the result of a script, the body of a function."""
        return self.post("/execute/sync", script=script, args=args)

    def wait(self, script, *args):
        """Return the value that a script passes to `done`."""
        return self.post("/execute/async", script=f"const done = arguments[arguments.length - 1]; {script}", args=args)

    def press(self, *keys):
        """Press keys in the element with the focus."""
        typed = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self.post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": typed}])

    def list_errors(self):
        """Return the messages of the console since the last call."""
        return [entry["message"] for entry in self.post("/se/log", type="browser")]

    def close(self):
        """End the browser, then the driver."""
        self.connection.request("DELETE", self.path)
        self.connection.getresponse().read()
        self.connection.close()
        self.driver.terminate()
        self.driver.wait(30)
        self.driver.stdout.close()
