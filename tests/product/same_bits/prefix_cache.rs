//! The prefix cache and drafts through the whole product: requests that begin alike are computed once, several tokens
//! come out of a step, and no bit of an answer tells.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{Server, fixture, from_environment, signal};

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

/// Request `number` of a storm: it begins as others do, for so many of 260 tokens, and goes on as some of these do for
/// so many of 60. Its answer shows every bit.
fn request(number: u64) -> Value {
    let chance = |of: u64, bound: u64| mix(number * 16 + of) % bound;
    let mut prompt = tokens(chance(0, 2), 260);
    prompt.truncate(20 * chance(1, 14) as usize);
    prompt.extend(tokens(100 + chance(2, 3), 1 + chance(3, 60)));
    // Behind the prompt of one of three nothing is computed that another would have to go on with.
    let max_tokens = if chance(8, 3) == 0 { 1 } else { 1 + chance(4, 90) };
    let mut request = json!({
        "prompt": prompt, "max_tokens": max_tokens, "seed": chance(5, 3), "temperature": chance(6, 2), "logprobs": 2,
        "ignore_eos": true,
    });
    match chance(7, 6) {
        0 => request["repetition_penalty"] = json!(1.2),
        1 => request["cache_salt"] = json!("another"),
        // A text that repeats itself, for drafts to hold.
        2 => request["logit_bias"] = json!({"300": 100, "301": 98}),
        // Masks, with drafts that they allow or not.
        3 => {
            request["guided_regex"] = json!("((ab|cd){3}x|[0-9]{9})*");
            request["ignore_eos"] = json!(false);
        }
        4 => request["echo"] = json!(true),
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
    let requests = from_environment("LOOPLANE_STORM_REQUESTS", 120);
    let most_ranks = from_environment("LOOPLANE_STORM_RANKS", 4);
    let model = fixture("llama-mha16");
    let model = model.to_str().expect("the path is UTF-8");
    let no_drafts = r#"{"method": "suffix", "num_speculative_tokens": 0}"#;
    let plain = ["--prefix-cache", "off", "--speculative-config", no_drafts];
    let calm = Server::start(&[&["--model", model, "--tp", "1"], &plain[..]].concat()).await;
    let answers = futures::stream::iter(0..requests).map(async |number| answer(&calm, &request(number)).await);
    let expected: Vec<_> = answers.buffered(8).collect().await;
    assert!(expected.iter().all(|(_, cached)| *cached == 0));
    assert_eq!(counted(&calm, "vllm:prefix_cache_hits_total").await, 0);
    drop(calm);
    // Caches that hold many prompts, and such that hold two sequences; workers of two groups die in the middle.
    let runs = [(1, "40", true), (2, "15", true), (4, "14", false)];
    let between_deaths = (requests / 2).min(2500);
    for (tp, pages, dies) in runs.into_iter().filter(|(tp, ..)| *tp <= most_ranks) {
        let ranks = tp.to_string();
        let server = Server::start(&["--model", model, "--tp", &ranks, "--kv-pages", pages, "--max-slots", "6"]).await;
        let (mut under_way, mut cached, mut prompts) = (FuturesUnordered::new(), 0, 0);
        let mut next = 0;
        while next < requests || !under_way.is_empty() {
            while next < requests && under_way.len() < 8 {
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
            assert_eq!(choices, expected[number as usize].0, "tp {tp}, {pages} pages: request {number}");
            cached += of_prompt;
            prompts += request(number)["prompt"].as_array().unwrap().len() as u64;
            if dies && number > 0 && number.is_multiple_of(between_deaths) {
                signal(*server.workers().last().expect("a worker"), Signal::KILL);
            }
        }
        assert!(cached * 6 > prompts, "tp {tp}, {pages} pages: only {cached} of {prompts} tokens were cached");
        let hits = counted(&server, "vllm:prefix_cache_hits_total").await;
        let queries = counted(&server, "vllm:prefix_cache_queries_total").await;
        assert!(hits >= cached && queries >= prompts && queries > hits, "{hits} of {queries}");
        assert_eq!(
            counted(&server, "looplane_worker_losses_total").await,
            if dies { (requests - 1) / between_deaths } else { 0 }
        );
        assert_eq!(counted(&server, "looplane_kv_cache_pages_used").await, 0);
        assert!(counted(&server, "looplane_kv_cache_pages_cached").await > 0);
        let [drafted, accepted] = ["draft", "accepted"].map(|of| format!("vllm:spec_decode_num_{of}_tokens_total"));
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

/// What the last page holds that a sequence did not fill is not computed again by who goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_goes_on_in_the_middle_of_a_page() {
    let model = fixture("llama-gqa");
    let model = model.to_str().expect("the path is UTF-8");
    let mut answers = Vec::new();
    for options in [&[][..], &["--prefix-cache", "off"]] {
        let server = Server::start(&[&["--model", model, "--tp", "2"], options].concat()).await;
        let mut cached = Vec::new();
        for len in [30, 100, 101, 228, 229, 129] {
            let request = json!({"prompt": tokens(1, len), "max_tokens": 1, "temperature": 0, "logprobs": 3});
            let (choices, of_prompt) = answer(&server, &request).await;
            answers.push(choices);
            cached.push(of_prompt);
        }
        let expected = if options.is_empty() { [0, 0, 100, 101, 228, 128] } else { [0; 6] };
        assert_eq!(cached, expected);
    }
    assert_eq!(answers[..6], answers[6..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_tells_how_its_drafts_fared_where_that_is_asked_for() {
    let model = fixture("llama-gqa");
    let model = model.to_str().expect("the path is UTF-8");
    let server = Server::start(&["--model", model, "--tp", "2", "--per-request-spec-decode-metrics", "detailed"]).await;
    let mut request = json!({
        "prompt": tokens(1, 40), "max_tokens": 60, "temperature": 0, "ignore_eos": true,
        "logit_bias": {"300": 100, "301": 98},
    });
    let whole = server.ok("/v1/completions", &request).await;
    let told = &whole["metrics"]["speculative_decoding"];
    let number = |of: &str| told[of].as_u64().unwrap_or_else(|| panic!("{of} in {told}"));
    let sum = |of: &Value| of.as_array().unwrap().iter().map(|of| of.as_u64().unwrap()).sum::<u64>();
    let (steps, accepted) = (number("num_spec_steps"), number("num_accepted_draft_tokens"));
    assert!(steps > 0 && 0 < accepted && accepted < 60, "{told}");
    assert_eq!(sum(&told["acceptance_histogram"]), steps);
    assert_eq!(sum(&told["per_step_accepted"]), accepted);
    assert_eq!(sum(&told["per_step_drafted"]), number("num_draft_tokens"));
    for (name, expected) in [("drafts", steps), ("accepted_tokens", accepted)] {
        assert_eq!(counted(&server, &format!("vllm:spec_decode_num_{name}_total")).await, expected);
    }
    let mut with_usage = request.clone();
    with_usage["stream_options"] = json!({"include_usage": true});
    let mut stream = server.stream("/v1/completions", &with_usage).await;
    let mut last = Value::Null;
    while let Some(event) = stream.next().await {
        assert!(event["usage"].is_object() || event.get("metrics").is_none(), "{event}");
        last = event;
    }
    let streamed = &last["metrics"]["speculative_decoding"];
    assert!(streamed["num_accepted_draft_tokens"].as_u64().unwrap() > 0, "{last}");
    request["n"] = json!(2);
    let two = server.ok("/v1/completions", &request).await;
    assert_eq!(two["metrics"], json!({"speculative_decoding": null}), "of one sequence only");
}

/// Of a text that does not repeat itself no drafts hold, but of the same text again almost all do.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_answered_before_comes_in_few_steps_where_the_salt_is_the_same() {
    let model = fixture("llama-mha16");
    let model = model.to_str().expect("the path is UTF-8");
    let off = r#"{"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_corpus_tokens": 0}"#;
    for (corpus, options) in [(true, &[][..]), (false, &["--speculative-config", off])] {
        let args = ["--model", model, "--tp", "2", "--per-request-spec-decode-metrics", "summary"];
        let server = Server::start(&[&args, options].concat()).await;
        let mut texts = Vec::new();
        for salt in ["a", "a", "b"] {
            let request = json!({
                "prompt": tokens(7, 60), "max_tokens": 80, "temperature": 1.3, "seed": 5, "ignore_eos": true,
                "cache_salt": salt, "logprobs": 1,
            });
            let again = corpus && salt == "a" && !texts.is_empty();
            // On a machine that is busy with other things rows may seem dear, and few are drafted: not every time.
            for attempt in 0.. {
                let answer = server.ok("/v1/completions", &request).await;
                let accepted = &answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"];
                let accepted = accepted.as_u64().unwrap();
                texts.push(answer["choices"].clone());
                if if again { accepted > 50 } else { accepted < 20 } {
                    break;
                }
                assert!(again && attempt < 5, "{salt}, corpus {corpus}: {accepted}");
            }
        }
        assert!(texts.iter().all(|text| *text == texts[0]));
    }
}
