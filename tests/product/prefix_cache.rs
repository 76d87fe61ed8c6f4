//! The prefix cache and drafts through the whole product: requests that begin alike are computed once, several tokens
//! come out of a step, and no bit of an answer tells.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{Server, fixture, signal};

/// A step of splitmix64.
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Token ids of a text of its own. The first are control tokens.
fn tokens(seed: u64, count: u64) -> Vec<u32> {
    (0..count).map(|i| 8 + (mix(seed << 20 ^ i) % 700) as u32).collect()
}

/// Request `number` of a storm: it begins as others do, for so many of 260 tokens, and its answer shows every bit.
fn request(number: u64) -> Value {
    let chance = |of: u64, bound: u64| mix(number * 16 + of) % bound;
    let mut prompt = tokens(chance(0, 2), 260);
    prompt.truncate(chance(1, 261) as usize);
    prompt.extend(tokens(100 + chance(2, 3), 1 + chance(3, 60)));
    let mut request = json!({
        "prompt": prompt, "max_tokens": 1 + chance(4, 90), "seed": chance(5, 3), "temperature": chance(6, 2),
        "logprobs": 2, "ignore_eos": true,
    });
    match chance(7, 4) {
        0 => request["repetition_penalty"] = json!(1.2),
        1 => request["cache_salt"] = json!("another"),
        // A text that repeats itself, for drafts to hold.
        2 => request["logit_bias"] = json!({"300": 100, "301": 98}),
        _ => {}
    }
    request
}

async fn answer(server: &Server, request: &Value) -> (Value, u64) {
    let mut answer = server.ok("/v1/completions", request).await;
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("it is always told");
    let [prompt, completion, total] =
        ["prompt_tokens", "completion_tokens", "total_tokens"].map(|of| answer["usage"][of].as_u64().unwrap());
    assert!(cached < prompt && prompt + completion == total, "{}", answer["usage"]);
    (answer["choices"].take(), cached)
}

/// A counter of `/metrics`.
async fn counted(server: &Server, name: &str) -> u64 {
    let (_, text) = server.get("/metrics").await;
    let text = text.as_str().expect("metrics are text").to_owned();
    let line = text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap_or_else(|| panic!("no {name}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_requests_that_begin_alike_gets_the_bits_of_no_cache() {
    const REQUESTS: u64 = 120;
    let model = fixture("llama-mha16");
    let model = model.to_str().expect("the path is UTF-8");
    let no_drafts = r#"{"method": "suffix", "num_speculative_tokens": 0}"#;
    let plain = ["--prefix-cache", "off", "--speculative-config", no_drafts];
    let calm = Server::start(&[&["--model", model, "--tp", "1"], &plain[..]].concat()).await;
    let mut expected = Vec::new();
    for number in 0..REQUESTS {
        let (choices, cached) = answer(&calm, &request(number)).await;
        assert_eq!(cached, 0);
        expected.push(choices);
    }
    assert_eq!(counted(&calm, "looplane_prefix_cache_hits_total").await, 0);
    drop(calm);
    // Caches that hold many prompts, and such that hold two sequences; the workers of one die in the middle.
    for (tp, pages, dies) in [("1", "40", false), ("2", "15", true), ("4", "14", false)] {
        let server = Server::start(&["--model", model, "--tp", tp, "--kv-pages", pages, "--max-slots", "6"]).await;
        let (mut under_way, mut cached, mut prompts) = (FuturesUnordered::new(), 0, 0);
        let mut next = 0;
        while next < REQUESTS || !under_way.is_empty() {
            while next < REQUESTS && under_way.len() < 8 {
                let (number, server) = (next, &server);
                under_way.push(async move { (number, answer(server, &request(number)).await) });
                if number % 10 == 3 {
                    // A client that goes away.
                    let mut stream = server.stream("/v1/completions", &request(number + 1)).await;
                    stream.next().await;
                }
                next += 1;
            }
            let Some((number, (choices, of_prompt))) = under_way.next().await else { break };
            assert_eq!(choices, expected[number as usize], "tp {tp}, {pages} pages: request {number}");
            cached += of_prompt;
            prompts += request(number)["prompt"].as_array().unwrap().len() as u64;
            if dies && number == REQUESTS / 2 {
                signal(server.workers()[1], Signal::KILL);
            }
        }
        assert!(cached * 6 > prompts, "tp {tp}, {pages} pages: only {cached} of {prompts} tokens were cached");
        let hits = counted(&server, "looplane_prefix_cache_hits_total").await;
        let queries = counted(&server, "looplane_prefix_cache_queries_total").await;
        assert!(hits >= cached && queries >= prompts && queries > hits, "{hits} of {queries}");
        assert_eq!(counted(&server, "looplane_worker_losses_total").await, u64::from(dies));
        assert_eq!(counted(&server, "looplane_kv_cache_pages_used").await, 0);
        assert!(counted(&server, "looplane_kv_cache_pages_cached").await > 0);
        let [drafted, accepted] = ["draft", "accepted"].map(|of| format!("looplane_spec_decode_num_{of}_tokens_total"));
        let (drafted, accepted) = (counted(&server, &drafted).await, counted(&server, &accepted).await);
        assert!(0 < accepted && accepted <= drafted, "{accepted} of {drafted} drafted tokens were accepted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_says_what_was_cached() {
    let model = fixture("llama-gqa");
    let server = Server::start(&["--model", model.to_str().expect("the path is UTF-8"), "--tp", "2"]).await;
    let mut request = json!({
        "prompt": tokens(1, 200), "max_tokens": 4, "temperature": 0, "n": 2, "stream_options": {"include_usage": true},
    });
    // Three full pages lie before the last token.
    for (salt, cached) in [(None, 0), (None, 192), (Some("mine"), 0), (Some("mine"), 192), (Some("yours"), 0)] {
        if let Some(salt) = salt {
            request["cache_salt"] = json!(salt);
        }
        let mut stream = server.stream("/v1/completions", &request).await;
        let mut usage = Value::Null;
        while let Some(event) = stream.next().await {
            usage = event["usage"].clone();
        }
        assert_eq!(usage["prompt_tokens_details"], json!({"cached_tokens": cached}), "{salt:?}");
        assert_eq!(usage["prompt_tokens"], 200);
    }
}
