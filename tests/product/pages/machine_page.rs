//! The machine on the page at `/`, in a browser: what is live, what is cancelled, and what a page does where its server
//! is gone, is full, or asks for a key.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    browser::{self, Browser},
    common::{PATIENCE, Server, draw_key, fixture, signal, until},
};

/// Of the window, in pixels: wide enough for both halves of the page.
const WIDTH: u32 = 1300;
/// A name that would do something if it were read as HTML.
const ODD_ID: &str = "<img/src=x/onerror=document.title=1>";

fn started() -> Option<Browser> {
    browser::find().map_err(|why| eprintln!("skipped: {why}")).ok().map(|path| Browser::start(&path))
}

async fn two_replicas() -> Server {
    let model = fixture("llama-tied");
    Server::start(&["--model", model.to_str().expect("UTF-8"), "--replicas", "2", "--tp", "1"]).await
}

/// A request that goes on for long, with its name and its key.
async fn long(server: &Server, id: &str, key: &str) -> hyper::Response<hyper::body::Incoming> {
    let body = json!({"prompt": "on and on", "max_tokens": 1900, "ignore_eos": true, "stream": true}).to_string();
    let bearer = format!("Bearer {key}");
    let headers = [("content-type", "application/json"), ("x-request-id", id), ("authorization", &bearer)];
    server.call(hyper::Method::POST, "/v1/completions", &headers, body).await
}

/// Looks until a condition of the page holds, and returns what `then` is.
fn when(browser: &mut Browser, is_so: &str, then: &str) -> Value {
    // The browser is waited for as long.
    let limit = PATIENCE.as_millis() / 2;
    browser.evaluate(&format!(
        "new Promise((done, fail) => {{
            const begun = Date.now();
            (function look() {{
                if ({is_so}) return done({then});
                if (Date.now() - begun > {limit}) return fail(Error(document.body.innerText));
                setTimeout(look, 10);
            }})();
        }})"
    ))
}

const LANES: &str = "[...byId('lanes').children].map(lane => lane.innerText)";
const REQUESTS: &str = "[...byId('requests').querySelectorAll('td:first-child')].map(cell => cell.textContent)";

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_is_seen_while_its_stream_goes_on() {
    let Some(mut browser) = started() else { return };
    let server = two_replicas().await;
    browser.open(server.base(), WIDTH, false);
    when(&mut browser, "model && byId('state').textContent.includes('2 of 2 replicas')", "0");
    // Both replicas decode, one of them for the page: for long, whatever the model says.
    browser.evaluate(
        "const real = window.fetch;
         window.fetch = (path, options) => real(path, options.body ? { ...options, body: JSON.stringify(
             { ...JSON.parse(options.body), ignore_eos: true, max_tokens: 1900 }) } : options);
         byId('text').value = 'Tell me a very long story'; byId('send').click()",
    );
    // Beside others, so that it takes its time.
    let mut others = Vec::new();
    for number in 0..30 {
        others.push(long(&server, &format!("other-{number}"), "").await);
    }
    when(&mut browser, "chat.stream && document.querySelector('.assistant').textContent", "0");
    let computes = format!("{LANES}.filter(lane => /% of limit/.test(lane)).length");
    when(&mut browser, &format!("{computes} === 2"), "0");
    let figures = when(&mut browser, "parseInt(byId('figures').querySelector('dd').textContent) > 0", LANES);
    assert_eq!(figures.as_array().map(Vec::len), Some(2), "{figures}");
    assert_eq!(browser.evaluate("chat.stream !== null"), true);
    signal(server.workers()[0], Signal::KILL);
    let note = when(&mut browser, "byId('lanes-note').textContent", "byId('lanes-note').textContent");
    assert!(note.as_str().is_some_and(|note| note.contains("1 × in replica")), "{note}");
    drop(others);
    let ended = when(&mut browser, "!chat.stream", "byId('log').innerText");
    assert!(ended.as_str().is_some_and(|seen| seen.contains("1900 tokens, first after ")), "it went on: {ended}");
    // Its timeline, of what the server kept.
    browser.evaluate("document.querySelector('.note .link').click()");
    let phases = when(
        &mut browser,
        "byId('timeline').querySelectorAll('dt').length === 4",
        "[...byId('timeline').querySelectorAll('dt')].map(name => name.textContent)",
    );
    assert_eq!(phases, json!(["prepare", "queue", "prefill", "decode"]));
    assert_eq!(browser.complaints(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_cancelled_ends_on_the_server_and_names_are_no_markup() {
    let Some(mut browser) = started() else { return };
    let server = Server::start(&["--max-slots", "4"]).await;
    let mut crowd = Vec::new();
    for number in 0..40 {
        crowd.push(long(&server, &format!("crowd-{number}"), "").await);
    }
    let odd = long(&server, ODD_ID, "").await;
    browser.open(server.base(), WIDTH, true);
    let shown = when(&mut browser, "byId('requests').children.length", REQUESTS);
    let shown = shown.as_array().expect("a list");
    assert_eq!((shown.len(), &shown[0]), (32, &json!(ODD_ID)), "a bounded list, the newest first");
    let note = browser.evaluate("byId('requests-note').textContent");
    assert_eq!(note, "The newest 32 of 41.");
    assert_eq!(browser.evaluate("document.querySelectorAll('#machine img').length"), 0);
    // By the keyboard: the button has the focus, and keeps it where the rows move.
    browser.evaluate("byId('requests').querySelector('td:last-child button').click()");
    let gone = format!("!{REQUESTS}.includes({})", json!(ODD_ID));
    when(&mut browser, &gone, "0");
    let body = http_body_util::BodyExt::collect(odd.into_body()).await.expect("its stream ends").to_bytes();
    assert!(String::from_utf8_lossy(&body).contains("request_aborted"), "{}", String::from_utf8_lossy(&body));
    drop(crowd);
    let idle = async || server.get("/load").await.1 == json!({"server_load": 0});
    until("nothing is served", idle).await;
    when(&mut browser, "byId('requests-note').textContent === 'None.'", "0");
    assert_eq!(browser.complaints(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_sees_and_ends_its_own_requests_alone() {
    let Some(mut browser) = started() else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (alice, alices) = draw_key(&["alice", "--concurrent", "2"]);
    let (bob, bobs) = draw_key(&["bob"]);
    let path = dir.path().join("keys");
    std::fs::write(&path, format!("{alices}\n{bobs}\n")).expect("it can be written");
    let server = Server::start(&["--api-key-file", path.to_str().expect("UTF-8")]).await;
    let (_of_bob, _of_alice) = (long(&server, "of-bob", &bob).await, long(&server, "of-alice", &alice).await);
    browser.open(server.base(), WIDTH, false);
    let state = when(&mut browser, "byId('state').dataset.state === 'locked'", "byId('state').textContent");
    assert_eq!(state, "The server asks for an API key");
    browser.evaluate(&format!("byId('key').value = '{alice}'; byId('unlock').requestSubmit()"));
    assert_eq!(when(&mut browser, "byId('requests').children.length", REQUESTS), json!(["of-alice"]));
    assert_eq!(browser.evaluate("byId('requests-note').textContent"), "1 of other keys.");
    // Not another's, though its name is known.
    let bearer = format!("Bearer {alice}");
    let answer = server.call(hyper::Method::DELETE, "/requests/of-bob", &[("authorization", &bearer)], "").await;
    assert_eq!(answer.status(), 404);
    // A second of its own, and then none: the chat says why.
    let _second = long(&server, "second", &alice).await;
    when(&mut browser, "model", "(byId('text').value = 'Hi', byId('send').click())");
    let refused = when(&mut browser, "document.querySelector('.error')", "document.querySelector('.error').innerText");
    assert!(refused.as_str().is_some_and(|said| said.contains("alice")), "{refused}");
    assert_eq!(browser.evaluate("[byId('text').value, chat.stream]"), json!(["Hi", null]), "nothing is lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_gone_or_talks_nonsense_is_said_to_be_and_a_hidden_page_asks_nothing() {
    let Some(mut browser) = started() else { return };
    let mut server = Server::start(&[]).await;
    browser.open(server.base(), WIDTH, false);
    when(&mut browser, "byId('state').dataset.state === 'ready'", "0");
    // An answer that is no JSON, once.
    browser.evaluate(
        "const real = window.fetch; let asked = 0;
         window.fetch = (path, options) => {
             asked += 1;
             return asked === 1 ? Promise.resolve(new Response('<p>proxy')) : real(path, options);
         }; 0",
    );
    let said = when(&mut browser, "byId('state').dataset.state === 'gone'", "byId('state').textContent");
    assert!(said.as_str().is_some_and(|said| said.contains("no JSON")), "{said}");
    when(&mut browser, "byId('state').dataset.state === 'ready'", "0");
    assert_eq!(browser.evaluate("panel.classList.contains('stale')"), false);
    // Hidden, it asks nothing; seen again, at once.
    let hidden = |is: bool| {
        format!(
            "Object.defineProperty(document, 'hidden', {{ configurable: true, value: {is} }});
             document.dispatchEvent(new Event('visibilitychange')); 0"
        )
    };
    browser.evaluate(&hidden(true));
    let asked = browser
        .evaluate("new Promise(done => setTimeout(() => { asked = 0; setTimeout(() => done(asked), 3000) }, 200))");
    assert_eq!(asked, 0);
    browser.evaluate(&hidden(false));
    when(&mut browser, "asked > 1 && before", "0");
    // Hours later it has kept no more than the plot shows.
    let kept = browser.evaluate(
        "for (let at = 0; at < 10_000; at++) {
             const now = structuredClone(before); now.at += 1000; show(now, before); before = now;
         }
         [points.length, document.querySelectorAll('#machine *').length < 200]",
    );
    assert_eq!(kept, json!([120, true]));
    server.kill();
    when(&mut browser, "byId('state').dataset.state === 'gone' && panel.classList.contains('stale')", "0");
    browser.evaluate("byId('text').value = 'Are you there?'; byId('send').click()");
    when(&mut browser, "document.querySelector('.error')", "0");
    assert_eq!(browser.evaluate("byId('text').value"), "Are you there?");
}
