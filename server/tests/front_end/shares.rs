//! Several API keys at one server: what a flood of one leaves to another, who goes first, and what answers tell of
//! limits.

use looplane_server::{
    engine::{Standing, SubmitError},
    keys::KeyLimits,
    listener::ServeOptions,
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    Server,
    client::{Response, read, read_until},
    engine::answer,
    keys::{refused, send, server},
    options,
    scrape::Scrape,
};

async fn ask(server: &Server, key: &str, method: &str, path: &str, body: &Value) -> Response {
    let body = body.to_string();
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n\
         authorization: Bearer {key}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    read(stream).await
}

fn free() -> KeyLimits {
    KeyLimits::default()
}

#[tokio::test]
async fn a_flood_of_one_key_leaves_places_to_another() {
    let (server, mut script, keys) = server(&[free(), free()], options()).await;
    let (flood, polite, body) = (&keys[0], &keys[1], json!({"prompt": [5]}));
    let mut running = Vec::new();
    // Three quarters of the 32.
    for _ in 0..24 {
        let client = send(&server, flood, &body).await;
        running.push((client, script.accept().await));
    }
    for _ in 0..50 {
        let response = read(send(&server, flood, &body).await).await;
        refused(&response, 429, "rate_limit_exceeded");
        let error = &response.json()["error"];
        let message = "the API key key-0 has 24 requests running, and the rest of the 32 places are kept for other \
                       keys (--max-concurrent-requests)";
        assert_eq!((&error["message"], &error["type"]), (&json!(message), &json!("rate_limit_error")));
        assert_eq!(response.header("retry-after"), Some("1"));
    }
    script.nothing_more();
    for _ in 0..10 {
        let (response, _) =
            tokio::join!(async { read(send(&server, polite, &body).await).await }, script.play(answer("x")));
        assert_eq!(response.status, 200, "{}", response.body);
    }
    // What gets free is the flood's again.
    let (client, sequence) = running.pop().unwrap();
    for event in answer("x") {
        sequence.send(event).await;
    }
    assert_eq!(read(client).await.status, 200);
    loop {
        let client = send(&server, flood, &body).await;
        let answered = tokio::select! {
            sequence = script.accept() => { drop(sequence); true }
            response = read(client) => { refused(&response, 429, "rate_limit_exceeded"); false }
        };
        if answered {
            break;
        }
    }
}

/// Uploads so many spaces of a body of `bytes`, as fast as they are taken; the answer, where one comes before.
async fn upload(server: &Server, key: &str, bytes: usize, spaces: usize) -> Result<TcpStream, Response> {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n\
         authorization: Bearer {key}\r\ncontent-length: {bytes}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let (piece, mut left, mut answered) = (vec![b' '; 256 << 10], spaces, false);
    let (reader, mut writer) = stream.split();
    while left > 0 && !answered {
        tokio::select! {
            biased;
            readable = reader.readable() => answered = readable.is_ok(),
            written = writer.write(&piece[..left.min(piece.len())]) => left -= written.unwrap(),
        }
    }
    if answered {
        return Err(read(stream).await);
    }
    Ok(stream)
}

#[tokio::test]
async fn large_bodies_of_one_key_leave_memory_to_those_of_another() {
    const LARGE: usize = 32 << 20;
    let served = ServeOptions { max_body_bytes: LARGE, ..options() };
    let (server, mut script, keys) = server(&[free(), free()], served).await;
    let scrape = async || Scrape::parse(&ask(&server, &keys[1], "GET", "/metrics", &json!({})).await.body);
    let held = async || scrape().await.value("upload_bytes", &[]) as usize;
    let mut hostile = Vec::new();
    let response = loop {
        match upload(&server, &keys[0], LARGE, LARGE - 1).await {
            Ok(stream) => hostile.push(stream),
            Err(response) => break response,
        }
    };
    refused(&response, 429, "rate_limit_exceeded");
    assert_eq!(response.header("retry-after"), Some("1"));
    assert!(response.body.contains("the bodies of the API key key-0 take"), "{}", response.body);
    // Whoever is slow holds what it has sent: of six bodies' memory four.
    assert_eq!(hostile.len(), 4);
    while held().await < 4 * (LARGE - (64 << 10)) - 4 {}
    let scraped = scrape().await;
    assert_eq!(scraped.value("key_requests_in_progress", &[("key", "key-0")]), 4.0);
    assert_eq!(scraped.value("key_refusals_total", &[("key", "key-0")]), 1.0);
    // Those and the one that asks.
    assert_eq!((scraped.value("connections", &[]), scraped.value("requests_in_progress", &[])), (5.0, 4.0));

    // JSON with as many spaces in front as a body has room for.
    let body = r#"{"prompt": [5]}"#;
    let other = async {
        let mut stream = upload(&server, &keys[1], LARGE, LARGE - body.len()).await.expect("it has its share");
        stream.write_all(body.as_bytes()).await.unwrap();
        read(stream).await
    };
    let (response, _) = tokio::join!(other, script.play(answer("x")));
    assert_eq!(response.status, 200, "{}", response.body);

    drop(hostile);
    while held().await > 0 {}
    while scrape().await.value("connections", &[]) > 1.0 {}
    assert_eq!(scrape().await.value("requests_in_progress", &[]), 0.0);
}

#[tokio::test]
async fn a_key_alone_may_take_all_places() {
    let (server, mut script, keys) = server(&[free()], ServeOptions { max_concurrent_requests: 4, ..options() }).await;
    let mut running = Vec::new();
    for _ in 0..4 {
        let client = send(&server, &keys[0], &json!({"prompt": [5]})).await;
        let submission = script.submission().await;
        assert_eq!(submission.standing, Standing::default());
        running.push((client, submission));
    }
    let response = read(send(&server, &keys[0], &json!({"prompt": [5]})).await).await;
    assert!(response.body.contains("the limit of 4 requests at one time"), "{}", response.body);
}

#[tokio::test]
async fn a_share_of_the_queue_that_is_used_up_is_an_answer_to_wait_for() {
    let (server, mut script, keys) = server(&[free(), free()], options()).await;
    let full = SubmitError::QueueFull { waiting: 48, limit: 48, what: "sequences of this API key".into() };
    let body = json!({"prompt": [5]});
    let (response, ()) = tokio::join!(async { read(send(&server, &keys[0], &body).await).await }, script.refuse(full));
    refused(&response, 429, "rate_limit_exceeded");
    assert_eq!(response.header("retry-after"), Some("1"));
    assert!(response.body.contains("48 of at most 48 sequences of this API key wait"), "{}", response.body);
}

#[tokio::test]
async fn priority_weight_and_owner_reach_the_scheduler_from_every_route() {
    let urgent = KeyLimits { weight: Some(5), priority: Some(-10), ..free() };
    let (server, mut script, keys) = server(&[urgent, free()], options()).await;
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let bodies = [
        ("/v1/completions", json!({"prompt": [5], "max_tokens": 2})),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 2})),
        ("/v1/messages", json!({"model": "tiny", "messages": messages, "max_tokens": 2})),
        ("/v1/responses", json!({"model": "tiny", "input": "Hi", "max_output_tokens": 16})),
    ];
    for (path, body) in bodies {
        for (key, priority, expected, weight) in
            [(0, Some(-10), -10, 5), (0, Some(100), 100, 5), (0, None, 0, 5), (1, Some(0), 0, 1), (1, Some(7), 7, 1)]
        {
            let mut body = body.clone();
            body["priority"] = json!(priority);
            let refuse = async {
                let submission = script.submission().await;
                let owner = Some(format!("key-{key}").into());
                assert_eq!(submission.standing, Standing { priority: expected, owner, weight }, "{path}");
                let _ = submission.reply.send(Err(SubmitError::Unavailable("resting".into())));
            };
            let (response, ()) = tokio::join!(ask(&server, &keys[key], "POST", path, &body), refuse);
            assert_eq!(response.status, 503, "{path} {}", response.body);
        }
        for (key, priority, says) in [
            (0, json!(-11), "-11 is before -10, the first that the API key key-0 may ask for"),
            (1, json!(-1), "-1 is before 0, the first that the API key key-1 may ask for"),
            (1, json!(101), "101 is not in [-100, 100]"),
            (1, json!(-101), "-101 is not in [-100, 100]"),
            (1, json!(1.5), "must be a whole number"),
            (1, json!("high"), "must be a whole number"),
        ] {
            let mut body = body.clone();
            body["priority"] = priority.clone();
            let response = ask(&server, &keys[key], "POST", path, &body).await;
            assert_eq!(response.status, 400, "{path} {priority}: {}", response.body);
            let error = &response.json()["error"];
            let message = error["message"].as_str().unwrap();
            assert!(message.contains("priority") && message.contains(says), "{path} {priority}: {message}");
            if path != "/v1/messages" {
                assert_eq!(error["param"], "priority", "{path} {priority}");
            }
        }
    }
    script.nothing_more();
}

#[tokio::test]
async fn answers_tell_what_is_left_of_limits() {
    let limited = KeyLimits { requests_per_minute: Some(2), tokens_per_minute: Some(1000), ..free() };
    let daily = KeyLimits { tokens_per_day: Some(100_000), ..free() };
    let (server, mut script, keys) = server(&[limited, daily, free()], options()).await;
    let told = |response: &Response, what: &str| {
        let header = |part: &str| response.header(&format!("x-ratelimit-{part}-{what}")).map(str::to_owned);
        [header("limit"), header("remaining"), header("reset")]
    };
    let words = |all: [&str; 3]| all.map(|word| Some(word.to_owned()));
    let nothing = [None, None, None];
    // To ask for anything else costs nothing.
    let response = ask(&server, &keys[0], "GET", "/v1/models", &json!({})).await;
    assert_eq!(told(&response, "requests"), words(["2", "2", "0ms"]));
    assert_eq!(told(&response, "tokens"), words(["1000", "1000", "0ms"]));
    let body = json!({"prompt": [5, 6, 7], "stream": true});
    let mut clients = Vec::new();
    for left in ["1", "0"] {
        let mut client = send(&server, &keys[0], &body).await;
        let sequence = script.accept().await;
        for event in answer("yes") {
            sequence.send(event).await;
        }
        let text = read_until(&mut client, "[DONE]").await;
        let header = |name: &str| text.lines().find_map(|line| line.strip_prefix(&format!("x-ratelimit-{name}: ")));
        assert_eq!((header("limit-requests"), header("remaining-requests")), (Some("2"), Some(left)), "{text}");
        let tokens: u32 = header("remaining-tokens").unwrap().parse().unwrap();
        assert!((980..=997).contains(&tokens), "{tokens}");
        clients.push(client);
    }
    let response = ask(&server, &keys[0], "POST", "/v1/completions", &body).await;
    refused(&response, 429, "rate_limit_exceeded");
    assert!(response.body.contains("has used the 2 requests a minute that it has"), "{}", response.body);
    let retry: u32 = response.header("retry-after").unwrap().parse().unwrap();
    assert!((28..=30).contains(&retry), "{retry}");
    let [limit, remaining, reset] = told(&response, "requests");
    assert_eq!((limit.as_deref(), remaining.as_deref()), (Some("2"), Some("0")));
    let reset = reset.unwrap();
    assert!(reset == "1m0s" || reset.starts_with("5") && reset.ends_with('s'), "{reset}");
    let (response, _) = tokio::join!(
        async { read(send(&server, &keys[1], &json!({"prompt": [5]})).await).await },
        script.play(answer("x"))
    );
    assert_eq!(told(&response, "requests"), nothing);
    let [limit, remaining, _] = told(&response, "tokens");
    assert_eq!((limit.as_deref(), remaining.as_deref()), (Some("100000"), Some("99997")), "one asked, two answered");
    let response = ask(&server, &keys[2], "GET", "/v1/models", &json!({})).await;
    assert_eq!((told(&response, "requests"), told(&response, "tokens")), (nothing.clone(), nothing));
    // Whoever may scrape sees what each has used, and no key.
    let response = ask(&server, &keys[2], "GET", "/metrics", &json!({})).await;
    let scrape = Scrape::parse(&response.body);
    let of = |name: &str, key: &str| scrape.value(name, &[("key", key)]);
    assert_eq!((of("key_requests_total", "key-0"), of("key_refusals_total", "key-0")), (2.0, 1.0));
    assert_eq!((of("key_prompt_tokens_total", "key-0"), of("key_requests_total", "key-2")), (6.0, 0.0));
    assert_eq!((of("key_prompt_tokens_total", "key-1"), of("key_generation_tokens_total", "key-1")), (1.0, 2.0));
    assert!(keys.iter().all(|key| !response.body.contains(key.as_str())));
}
