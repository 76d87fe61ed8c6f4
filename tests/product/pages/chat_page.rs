//! The chat page in a browser, against a server that the test plays, and against real ones; and the `curl` that a
//! server suggests.

use serde_json::{Value, json};

use crate::{
    browser::{self, Browser},
    common::{Server, copy_of, edit_json, fixture},
};

/// Stands in for the server once the page is open.
const PLAYED: &str = include_str!("chat_page.js");
/// Of the window, in pixels.
const WIDTH: u32 = 800;

/// A model without a chat template.
fn bare() -> tempfile::TempDir {
    let dir = copy_of("llama-tied");
    edit_json(&dir.path().join("tokenizer_config.json"), |config| {
        config.as_object_mut().expect("an object").remove("chat_template").expect("the fixture has one");
    });
    dir
}

/// The body of the `curl` that the server suggests, after its path.
async fn suggested(server: &Server) -> (String, Value) {
    let (_, text) = server.get("/").await;
    let text = text.as_str().expect("a text");
    let curl = text.split_once(&format!("curl {}", server.base())).expect("a curl to this server").1;
    let (path, rest) = curl.split_once(' ').expect("options follow");
    let body = rest.split('\'').nth(3).expect("a quoted body after a quoted header");
    (path.to_owned(), serde_json::from_str(body).expect("JSON"))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_suggests_can_be_answered() {
    let bare = bare();
    let with_template = fixture("llama-tied");
    for (model, wanted) in [(with_template.as_path(), "/v1/chat/completions"), (bare.path(), "/v1/completions")] {
        let server = Server::start(&["--model", model.to_str().expect("UTF-8"), "--tp", "1"]).await;
        let (path, body) = suggested(&server).await;
        assert_eq!(path, wanted);
        server.ok(&path, &body).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_keeps_chats_apart_and_is_true() {
    let Some(browser) = browser::find().map_err(|why| eprintln!("skipped: {why}")).ok() else { return };
    let server = Server::start(&[]).await;
    let mut browser = Browser::start(&browser);
    let open = |browser: &mut Browser| {
        browser.open(server.base(), WIDTH, false);
        browser.evaluate("new Promise(done => { (function look() { model ? done() : setTimeout(look, 10) })() })");
    };

    // The real server, to the end of an answer.
    open(&mut browser);
    let asks = "byId('text').value = 'What is 12 + 30?'; byId('send').click()";
    let ended = "(function look() { chat.stream ? setTimeout(look, 10) : done(byId('log').innerText) })()";
    let seen = browser.evaluate(&format!("new Promise(done => {{ {asks}; {ended} }})"));
    let seen = seen.as_str().expect("a text");
    assert!(seen.contains("12 + 30 = 42.") && seen.contains(" tokens, first after "), "{seen}");

    let mut play = |script: &str| {
        open(&mut browser);
        let script = format!("(async () => {{ {PLAYED}\n {script} }})()");
        let result = browser.evaluate(&script);
        assert_eq!(browser.complaints(), [""; 0]);
        result
    };
    // A new chat knows nothing of the stream that runs under the old one.
    let left = play(
        "type('one'); await settle(); asked[0].piece('old '); await settle(); const before = seen();
         press('reset'); await settle(); type('two'); await settle();
         asked[1].piece('new'); asked[1].end(1); await settle(); type('three'); await settle();
         const [first, second] = [asked[1].body.messages, asked[2].body.messages];
         return { before, aborted: asked[0].aborted, seen: seen(), first, second }",
    );
    assert!(left["before"].as_str().is_some_and(|seen| seen.contains("old")), "{left}");
    assert!(left["seen"].as_str().is_some_and(|seen| seen.contains("new") && !seen.contains("old")), "{left}");
    assert_eq!((&left["aborted"], &left["first"]), (&json!(true), &json!([{"role": "user", "content": "two"}])));
    let turns = [("user", "two"), ("assistant", "new"), ("user", "three")];
    assert_eq!(left["second"], json!(turns.map(|(role, content)| json!({"role": role, "content": content}))));

    // Enter under a stream leaves the stream, and what was typed; Stop ends it, and the next question knows what came.
    let stopped = play(
        "const idle = [shown('send'), shown('stop')];
         type('one'); await settle(); asked[0].piece('part'); await settle(); type('two'); await settle();
         const during = [asked.length, asked[0].aborted, byId('text').value, shown('send'), shown('stop')];
         press('stop'); await settle(); const aborted = asked[0].aborted; press('send'); await settle();
         return { idle, during, aborted, messages: asked[1].body.messages }",
    );
    assert_eq!(stopped["idle"], json!([true, false]));
    assert_eq!(stopped["during"], json!([1, false, "two", false, true]));
    assert_eq!(stopped["aborted"], true);
    assert_eq!(stopped["messages"][1], json!({"role": "assistant", "content": "part"}));
    assert_eq!(stopped["messages"][2]["content"], "two");

    // Tokens a second are those between the first and the last one, and none are told of a burst.
    let rated = play(
        "type('one'); await settle(); clock = 300; asked[0].piece('a'); await settle();
         clock = 2300; asked[0].piece('b'); await settle(); clock = 9000; asked[0].end(101); await settle();
         const slow = seen(); press('reset');
         type('two'); await settle(); asked[1].piece('a'); asked[1].piece('b'); asked[1].end(500); await settle();
         return { slow, burst: seen() }",
    );
    let ends = |name: &str, end: &str| rated[name].as_str().is_some_and(|seen| seen.trim_end().ends_with(end));
    assert!(ends("slow", "101 tokens, first after 300 ms, 50 tokens/s"), "{rated}");
    assert!(ends("burst", "500 tokens, first after 0 ms"), "{rated}");

    // What the model says is text, whatever it looks like; an event that cannot be read ends the answer with a reason.
    let odd = play(
        "type('<img src=x onerror=alert(1)>'); await settle(); asked[0].piece('<b>bold</b><script>model = 0</script>');
         await settle(); asked[0].send('{\"choices\": [{'); await settle();
         return { seen: seen(), made: byId('log').querySelectorAll('img, b, script').length, send: shown('send') }",
    );
    let seen = odd["seen"].as_str().unwrap_or_default();
    assert!(seen.contains("<b>bold</b><script>") && seen.contains("an event that is no JSON"), "{odd}");
    assert_eq!((&odd["made"], &odd["send"]), (&json!(0), &json!(true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_asks_for_the_key_where_the_server_does() {
    let Some(browser) = browser::find().map_err(|why| eprintln!("skipped: {why}")).ok() else { return };
    let server = Server::start(&["--api-key", "sk-of-the-page"]).await;
    let mut browser = Browser::start(&browser);
    browser.open(server.base(), WIDTH, false);
    let mut when = |is_so: &str, then: &str| {
        let look = format!("(function look() {{ {is_so} ? done({then}) : setTimeout(look, 10) }})()");
        browser.evaluate(&format!("new Promise(done => {look})"))
    };
    let use_key = |key: &str| format!("(byId('key').value = '{key}', byId('unlock').requestSubmit())");
    when("byId('unlock').offsetParent", &use_key("sk-nobodys"));
    let seen = when("document.querySelector('.error')", "byId('log').innerText");
    assert_eq!(seen, "this API key is not known here");
    when("byId('unlock').offsetParent", &use_key("sk-of-the-page"));
    assert_eq!(when("model", "[byId('unlock').offsetParent, byId('key').value]"), json!([null, ""]));
    when("true", "(byId('text').value = 'What is 12 + 30?', byId('send').click())");
    let seen = when("!chat.stream", "byId('log').innerText");
    assert!(seen.as_str().is_some_and(|seen| seen.contains("12 + 30 = 42.")), "{seen}");
    // The tab keeps the key, and no more than the tab.
    assert_eq!(when("true", "[sessionStorage.length, localStorage.length, document.cookie]"), json!([1, 0, ""]));
    browser.open(server.base(), WIDTH, false);
    browser.evaluate("new Promise(done => { (function look() { model ? done() : setTimeout(look, 10) })() })");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_goes_on_with_texts_where_the_model_cannot_chat() {
    let Some(browser) = browser::find().map_err(|why| eprintln!("skipped: {why}")).ok() else { return };
    let bare = bare();
    let server = Server::start(&["--model", bare.path().to_str().expect("UTF-8"), "--tp", "1"]).await;
    let mut browser = Browser::start(&browser);
    browser.open(server.base(), WIDTH, false);
    let script = "new Promise(done => {
        (function ask() {
            if (!model) return setTimeout(ask, 10);
            byId('text').value = 'a b c'; byId('send').click(); look();
        })();
        function look() { chat.stream ? setTimeout(look, 10) : done(byId('log').innerText) }
    })";
    let seen = browser.evaluate(script);
    let seen = seen.as_str().expect("a text");
    assert!(seen.starts_with("This model has no chat template") && seen.contains(" tokens, first after "), "{seen}");
}
