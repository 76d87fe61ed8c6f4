//! What the mock says of itself: a few of the figures that vLLM has in its `/metrics`, under its names.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub struct Counts {
    running: AtomicU64,
    waiting: AtomicU64,
    prompt_tokens: AtomicU64,
    generation_tokens: AtomicU64,
}

/// A request that waits for its slot; dropping it is its end.
pub struct Waiting(Arc<Counts>);

/// A request that is answered; dropping it is its end, at which its tokens are counted.
pub struct Answering {
    counts: Arc<Counts>,
    tokens: u64,
}

impl Counts {
    pub fn arrive(self: &Arc<Self>) -> Waiting {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self.clone())
    }

    pub fn text(&self) -> String {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (running, waiting) = (of(&self.running), of(&self.waiting));
        let (prompt, generated) = (of(&self.prompt_tokens), of(&self.generation_tokens));
        format!(
            "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{model_name=\"mock\"}} {running}\n\
             # TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{model_name=\"mock\"}} {waiting}\n\
             # TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{{model_name=\"mock\"}} {prompt}\n\
             # TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{{model_name=\"mock\"}} {generated}\n"
        )
    }
}

impl Waiting {
    /// It got its slot, and will be answered with `tokens` tokens after a prompt of `prompt_tokens`.
    pub fn begin(self, prompt_tokens: u64, tokens: u64) -> Answering {
        self.0.running.fetch_add(1, Ordering::Relaxed);
        self.0.prompt_tokens.fetch_add(prompt_tokens, Ordering::Relaxed);
        Answering { counts: self.0.clone(), tokens }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.counts.running.fetch_sub(1, Ordering::Relaxed);
        self.counts.generation_tokens.fetch_add(self.tokens, Ordering::Relaxed);
    }
}
