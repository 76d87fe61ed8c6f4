//! Greedy tokens through the whole product are those that Hugging Face transformers computes, for every architecture.

use crate::common::{Server, fixture};
use looplane_server::text::Text;
use serde_json::{Value, json};

/// A step counts as decided if transformers' two best logits are further apart than this: over twice the error of a
/// logit that the worker's own tests allow (relative L2 norm 1e-2, logits of the fixtures about 1 in size).
const DECIDED: f64 = 0.06;

#[tokio::test(flavor = "multi_thread")]
async fn greedy_tokens_are_those_of_transformers() {
    let fixtures =
        ["llama-gqa", "llama31-scaled", "llama-tied", "llama-mha16", "qwen2-bias", "qwen3-qknorm", "mistral-window"];
    let mut compared = 0;
    for name in fixtures {
        let dir = fixture(name);
        let server = Server::start(&["--model", dir.to_str().expect("UTF-8"), "--tp", "2"]).await;
        let tokenizer = Text::load(&dir).expect("the fixture has a tokenizer").tokenizer;
        let expected = std::fs::read(dir.join("expected.json")).expect("it is there");
        let expected: Value = serde_json::from_slice(&expected).expect("it is JSON");
        for prompt in expected["prompts"].as_array().expect("a list") {
            let greedy = prompt["greedy"].as_array().expect("a list");
            let request = json!({"prompt": prompt["ids"], "max_tokens": greedy.len(), "temperature": 0, "logprobs": 0,
                "ignore_eos": true});
            let answer = server.ok("/v1/completions", &request).await;
            let got = answer["choices"][0]["logprobs"]["tokens"].as_array().expect("a list").clone();
            assert_eq!(got.len(), greedy.len());
            for (step, (id, got)) in greedy.iter().zip(&got).enumerate() {
                // Past a step that is not decided both may go on from another token.
                if prompt["margin"][step].as_f64().expect("a number") < DECIDED {
                    break;
                }
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).expect("a token id");
                // Tokens that are no whole character are spelled as bytes; the others suffice to tell texts apart.
                if let Ok(text) = str::from_utf8(tokenizer.token_bytes(id)) {
                    assert_eq!(got, text, "{name}: step {step} after {}", prompt["text"]);
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 100, "{compared} tokens compared show little");
}
