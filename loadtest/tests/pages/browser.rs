//! A headless browser, driven over the pipes of the Chrome DevTools Protocol: messages of JSON, each closed by a zero
//! byte (`--remote-debugging-pipe`, which reads file descriptor 3 and writes 4).

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use serde_json::{Value, json};

/// The variable that names the browser; with it set the test does not skip.
const VARIABLE: &str = "LOOPLANE_BROWSER";
/// Names under which distributions install one.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// How long an answer may take on a machine that is busy with other tests.
const LIMIT: Duration = Duration::from_secs(120);

/// One tab of a browser; gone when dropped.
pub struct Browser {
    process: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    last_id: u64,
    /// What the open page complained about.
    complaints: Vec<String>,
    _profile: tempfile::TempDir,
}

/// The browser to use, or why there is none.
pub fn find() -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os(VARIABLE) {
        let path = PathBuf::from(named);
        assert!(path.is_file(), "{VARIABLE} is {}, where there is no file", path.display());
        return Ok(path);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).flat_map(|dir| NAMES.map(|name| dir.join(name))).find(|file| file.is_file());
    found.ok_or_else(|| format!("no browser: install Chromium, or give {VARIABLE}=\"$(.ci/browser)\""))
}

impl Browser {
    pub fn start(path: &Path) -> Self {
        let profile = tempfile::tempdir().expect("a temporary directory");
        let mut process = Command::new("sh")
            .args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#])
            .arg(path)
            .args([
                "--headless",
                "--no-sandbox",
                "--no-zygote",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
            ])
            .args(["--remote-debugging-pipe", &format!("--user-data-dir={}", profile.path().display()), "about:blank"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh runs");
        let input = process.stdin.take().expect("piped");
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        let (sender, messages) = mpsc::channel();
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|bytes| bytes > 0) {
                let value = serde_json::from_slice(message.strip_suffix(&[0]).unwrap_or(&message));
                if sender.send(value.expect("the browser sends JSON")).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let (session, complaints) = (None, Vec::new());
        let mut browser = Self { process, input, messages, session, last_id: 0, complaints, _profile: profile };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", attached);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Opens the page at `url` in a window of `width` pixels, dark or light.
    pub fn open(&mut self, url: &str, width: u32, is_dark: bool) {
        let size = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = if is_dark { "dark" } else { "light" };
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
        self.complaints.clear();
        let opened = self.call("Page.navigate", json!({"url": url}));
        assert!(opened.get("errorText").is_none(), "{url} does not open: {opened}");
        while self.receive()["method"] != "Page.loadEventFired" {}
    }

    /// What `script` evaluates to in the open page; a promise, what it comes to.
    pub fn evaluate(&mut self, script: &str) -> Value {
        let how = json!({"expression": script, "returnByValue": true, "awaitPromise": true, "userGesture": true});
        let evaluated = self.call("Runtime.evaluate", how);
        assert!(evaluated.get("exceptionDetails").is_none(), "the script failed: {evaluated:#}");
        evaluated["result"]["value"].clone()
    }

    /// What the open page itself complained about: errors of its scripts, and what it could not load.
    pub fn complaints(&self) -> &[String] {
        &self.complaints
    }

    fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        write!(self.input, "{message}\0").expect("the browser reads");
        loop {
            let answer = self.receive();
            if answer["id"] == self.last_id {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    /// The next message; complaints of the page are kept.
    fn receive(&mut self) -> Value {
        let message = self.messages.recv_timeout(LIMIT).expect("the browser answers");
        match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => {
                let details = &message["params"]["exceptionDetails"];
                self.complaints.push(format!("script error: {}", details["exception"]["description"]));
            }
            Some("Log.entryAdded") => self.complaints.push(format!("log: {}", message["params"]["entry"]["text"])),
            _ => {}
        }
        message
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // A browser that has ended by itself cannot be killed and need not be.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
