//! The demo model answers what it was taught: at least 95 % in every category, on questions that training never saw.

use std::collections::BTreeMap;

use crate::common::Server;
use futures::StreamExt;
use serde_json::{Value, json};

/// Share of right answers that every category must reach, and by how much formats may be off, of all questions.
const WANTED: f64 = 0.95;
const LOSES: [(&str, f64); 2] = [("fp8", 0.01), ("int4", 0.03)];
/// Questions asked at one time: enough to fill the batch.
const AT_ONCE: usize = 32;

/// By category: asked, right, and an example of what went wrong.
type Table = BTreeMap<String, (u32, u32, String)>;

/// Asks a server with more options all questions.
async fn ask(options: &[&str]) -> Table {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/demo/questions.json");
    let file: Value = serde_json::from_slice(&std::fs::read(path).expect("the questions are there")).expect("JSON");
    let questions = file["questions"].as_array().expect("a list of questions");
    // The answers are the same on more workers, which would wait for each other on a busy machine.
    let server = Server::start(&[&["--tp", "1"], options].concat()).await;
    let answers = futures::stream::iter(questions).map(|question| {
        let server = &server;
        async move {
            let request = json!({"messages": question["messages"], "temperature": 0, "max_tokens": 128});
            let answer = server.ok("/v1/chat/completions", &request).await;
            let text = answer["choices"][0]["message"]["content"].as_str().expect("a text").trim().to_owned();
            (question, text)
        }
    });
    let mut table = Table::new();
    let mut answers = answers.buffer_unordered(AT_ONCE);
    while let Some((question, text)) = answers.next().await {
        let category = question["category"].as_str().expect("a name");
        let (asked, right, example) = table.entry(category.to_owned()).or_default();
        *asked += 1;
        if question["expected"] == text {
            *right += 1;
        } else {
            *example = format!("{}: expected {}, got {text:?}", question["messages"], question["expected"]);
        }
    }
    for (category, (asked, right, example)) in &table {
        println!("{category:20} {right:4} / {asked:4}   {example}");
    }
    table
}

/// Share of right answers to all questions.
fn right(table: &Table) -> f64 {
    let (asked, right) = table.values().fold((0, 0), |all, of| (all.0 + of.0, all.1 + of.1));
    f64::from(right) / f64::from(asked)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_model_answers_held_out_questions_in_few_bits_too() {
    let table = ask(&[]).await;
    assert!(table.values().all(|(asked, ..)| *asked >= 50), "so few questions show little: {table:?}");
    let low = table.iter().filter(|(_, (asked, right, _))| f64::from(*right) < WANTED * f64::from(*asked));
    assert_eq!(low.collect::<Vec<_>>(), Vec::new());
    assert!(table.len() >= 8, "{:?}", table.keys());
    let bf16 = right(&table);
    for (format, loses) in LOSES {
        let of = right(&ask(&["--quantization", format]).await);
        println!("right in bf16 {bf16:.4}, in {format} {of:.4}");
        assert!(of >= bf16 - loses, "right in bf16 {bf16}, in {format} {of}");
    }
}
