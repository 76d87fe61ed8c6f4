"""A server of the binary under test, and reports of its commands, for the scripts beside this file."""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

LOOPLANE = Path(__file__).resolve().parents[2] / "target/release/looplane"
PORT = 8123


class Server:
    """`looplane serve` with options, ready for requests; ended when the `with` block is left."""

    def __init__(self, looplane: Path, *options):
        self.command = [str(part) for part in (looplane, "serve", "--port", PORT, *options)]

    def __enter__(self):
        begun = time.monotonic()
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.wait_ready()
        self.ready_s = time.monotonic() - begun
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def wait_ready(self) -> None:
        while self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/ready", timeout=1)
                return
            except OSError:
                time.sleep(0.05)
        sys.exit(f"{' '.join(self.command)} ended before it was ready; run it to see why")

    def workers(self) -> list[int]:
        """Process ids, by rank: the server starts them in that order."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def report(*command) -> dict:
    """What a command of the binary writes to --json; ends the script if the command fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [str(part) for part in (*command, "--json", out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        return json.loads(out.read_text())


def completion_request(**fields) -> urllib.request.Request:
    """A request to /v1/completions, ready to be sent."""
    return urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(fields).encode(),
                                  {"content-type": "application/json"})


def completion(**fields):
    """An open answer of /v1/completions."""
    return urllib.request.urlopen(completion_request(**fields), timeout=120)
