//! Contract 4 through the whole product: the same bits for a request whatever the group size, the batch, the chunking
//! of the prompt, preemption or a fault.

use crate::common::{Server, fixture, runs, signal};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A request whose answer shows every bit: sampled tokens, and log-probabilities printed in full.
fn probe(seed: u64, max_tokens: u32) -> Value {
    json!({
        "prompt": "The quick brown fox jumps over the lazy dog, and then it reads the manual again: each option has a \
                   name.",
        "max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "logprobs": 5, "ignore_eos": true,
    })
}

async fn answer(server: &Server, request: &Value) -> Value {
    let mut answer = server.ok("/v1/completions", request).await;
    answer["choices"].take()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_group_size_gives_the_same_bits() {
    let model = fixture("llama-mha16");
    let model = model.to_str().expect("the path is UTF-8");
    let mut first: Option<Vec<Value>> = None;
    for tp in ["1", "2", "4", "8", "16"] {
        let server = Server::start(&["--model", model, "--tp", tp]).await;
        let mut answers = Vec::new();
        for request in [
            probe(7, 40),
            json!({"prompt": "1 2 3 4", "max_tokens": 20, "temperature": 0, "logprobs": 3}),
            json!({"prompt": "one", "max_tokens": 30, "temperature": 1.3, "top_p": 0.7, "top_k": 40, "min_p": 0.01,
                   "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
                   "logit_bias": {"300": 4.0}}),
        ] {
            answers.push(answer(&server, &request).await);
        }
        match &first {
            None => first = Some(answers),
            Some(first) => assert_eq!(first, &answers, "tp {tp} differs from tp 1"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_the_batch_nor_the_chunking_changes_a_bit() {
    let model = fixture("llama31-scaled");
    let model = model.to_str().expect("the path is UTF-8");
    let calm = Server::start(&["--model", model, "--tp", "1"]).await;
    let alone = answer(&calm, &probe(11, 64)).await;
    drop(calm);
    // 8 slots and 16 rows a step: prompts are cut into chunks and wait for each other.
    let busy = Server::start(&["--model", model, "--tp", "2", "--max-slots", "8", "--max-batch-tokens", "16"]).await;
    let request = probe(11, 64);
    let others = (0..14u64).map(|i| {
        let busy = &busy;
        async move { answer(busy, &probe(100 + i, 20 + 5 * (i as u32))).await }
    });
    let (again, others) = futures::join!(answer(&busy, &request), futures::future::join_all(others));
    assert_eq!(alone, again);
    assert_eq!(others.len(), 14);
    assert_ne!(others[0], alone, "another seed gives another text, or this test shows nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn preempted_sequences_come_out_the_same() {
    let model = fixture("llama-gqa");
    let model = model.to_str().expect("the path is UTF-8");
    let roomy = Server::start(&["--model", model, "--tp", "1"]).await;
    let calm = futures::future::join_all((0..6).map(|seed| {
        let (server, request) = (&roomy, probe(seed, 300));
        async move { answer(server, &request).await }
    }))
    .await;
    drop(roomy);
    // 12 pages of 64 positions hold two such sequences at their end: six cannot run without preemption.
    let tight = Server::start(&["--model", model, "--tp", "2", "--kv-pages", "12"]).await;
    let squeezed = futures::future::join_all((0..6).map(|seed| {
        let (server, request) = (&tight, probe(seed, 300));
        async move { answer(server, &request).await }
    }))
    .await;
    assert_eq!(calm, squeezed);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_survive_the_death_of_any_worker() {
    // Of eight, the last one's death is learned by most others.
    for (model, tp, victims) in [("qwen3-qknorm", 2, &[0, 1][..]), ("llama-gqa", 8, &[7])] {
        let model = fixture(model);
        let model = model.to_str().expect("the path is UTF-8");
        let server = Server::start(&["--model", model, "--tp", &tp.to_string()]).await;
        let request =
            json!({"prompt": "A long story:", "max_tokens": 600, "temperature": 1.0, "seed": 5, "ignore_eos": true});
        let (calm, _) = server.stream("/v1/completions", &request).await.text().await;
        for victim in victims {
            let mut stream = server.stream("/v1/completions", &request).await;
            let mut text = String::new();
            while text.len() < 40 {
                let event = stream.next().await.expect("the stream is not over after 40 bytes of 600 tokens");
                text.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
            }
            let before = server.workers();
            signal(before[*victim], Signal::KILL);
            let (rest, reason) = stream.text().await;
            assert_eq!(reason, "length");
            assert_eq!(calm, text + &rest, "rank {victim} of {tp} was killed");
            server.wait_ready().await;
            let after = server.workers();
            assert_eq!(after.len(), tp);
            assert!(before.iter().all(|pid| !after.contains(pid) && !runs(*pid)), "the whole group starts anew");
        }
    }
}
