//! worker/v1 messages to and from the worker's own types: the only place that knows both.

use std::sync::Arc;
use std::time::Duration;

use looplane_proto::worker::v1;

use crate::batch::{Admit, Drafts, Finish, PageGrant, Plan, PlanFault, PrefillChunk, StepTime, TokenBounds};
use crate::decoder::{Device, LoadError, LoadRequest, Loaded, Outcome, Progress, Sockets};
use crate::grammar::Vocabulary;
use crate::model::WeightFormat;
use crate::model::format::INT4;
use crate::plan::PAGE_POSITIONS;
use crate::sampling::SamplingParams;

/// Most log-probabilities a token can carry beside its own.
const MAX_TOP_LOGPROBS: u32 = 20;

/// Checks what a rank is to load.
///
/// # Errors
/// Names the field and its value.
pub fn load_request(request: v1::LoadRequest) -> Result<LoadRequest, LoadError> {
    let r = &request;
    let wrong = |problem: String| Err(LoadError::Request(problem));
    if r.model_dir.is_empty() {
        return wrong("model_dir is empty".into());
    }
    if r.rank >= r.tensor_parallel {
        return wrong(format!("rank {} of tensor_parallel {}", r.rank, r.tensor_parallel));
    }
    let before = r.socket.checked_sub(r.rank);
    let behind = before.and_then(|before| r.sockets.checked_sub(before + r.tensor_parallel));
    let others = match (r.sockets, before, behind) {
        (0, ..) => Sockets::default(),
        (_, Some(before), Some(behind)) => Sockets { before: before as usize, behind: behind as usize },
        _ => {
            let v1::LoadRequest { rank, tensor_parallel, socket, sockets, .. } = r;
            return wrong(format!("socket {socket} of {sockets} for rank {rank} of {tensor_parallel}"));
        }
    };
    for (field, value) in [("threads", r.threads), ("wait_limit_ms", r.wait_limit_ms)] {
        if value == 0 {
            return wrong(format!("{field} is 0"));
        }
    }
    if r.max_batch_tokens > 0 && r.max_batch_tokens < r.max_slots {
        return wrong(format!("max_batch_tokens {} is under max_slots {}", r.max_batch_tokens, r.max_slots));
    }
    let device = match v1::load_request::Device::try_from(r.device) {
        Ok(v1::load_request::Device::Auto) => Device::Auto,
        Ok(v1::load_request::Device::Cpu) => Device::Cpu,
        Ok(v1::load_request::Device::Cuda) => Device::Cuda,
        Err(_) => return wrong(format!("device is {}, which this worker does not know", r.device)),
    };
    let quantization = match v1::load_request::Quantization::try_from(r.quantization) {
        Ok(v1::load_request::Quantization::None) => None,
        Ok(v1::load_request::Quantization::Fp8) => Some(WeightFormat::E4m3),
        Ok(v1::load_request::Quantization::Int4) => Some(INT4),
        Err(_) => return wrong(format!("quantization is {}, which this worker does not know", r.quantization)),
    };
    Ok(LoadRequest {
        model_dir: request.model_dir.into(),
        rank: request.rank as usize,
        tensor_parallel: request.tensor_parallel as usize,
        threads: request.threads as usize,
        max_slots: request.max_slots as usize,
        max_batch_tokens: request.max_batch_tokens as usize,
        kv_pages: request.kv_pages as usize,
        kv_bytes_limit: request.kv_bytes_limit,
        wait_limit: Duration::from_millis(request.wait_limit_ms.into()),
        max_context: request.max_context as usize,
        device,
        quantization,
        unlooped: request.unlooped,
        draft_corpus_tokens: request.draft_corpus_tokens as usize,
        vocabulary: request.vocabulary.map(vocabulary).transpose()?.map(Arc::new),
        others,
        measure_read_limit: request.measure_read_limit,
    })
}

fn vocabulary(of: v1::Vocabulary) -> Result<Vocabulary, LoadError> {
    let (mut left, mut words) = (&of.texts[..], Vec::with_capacity(of.lengths.len()));
    for &length in &of.lengths {
        let Some((word, rest)) = left.split_at_checked(length as usize) else { break };
        words.push(word.to_owned());
        left = rest;
    }
    if words.len() < of.lengths.len() || !left.is_empty() || of.end as usize >= words.len() {
        let (bytes, tokens) = (of.texts.len(), of.lengths.len());
        let problem =
            format!("vocabulary: {bytes} bytes are not the texts of {tokens} tokens, of which {} ends", of.end);
        return Err(LoadError::Request(problem));
    }
    Ok(Vocabulary { words, end: of.end })
}

/// What was loaded, with where other ranks find this one.
pub fn loaded(loaded: &Loaded, fabric_handle: String) -> v1::LoadEvent {
    // Dimensions were checked to be far under u32 when config.json was read; pages are counted in u32 on the wire.
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let loaded = v1::Loaded {
        architecture: loaded.architecture.clone(),
        vocab_size: count(loaded.vocab_size),
        max_context: count(loaded.max_context),
        num_layers: count(loaded.num_layers),
        hidden_size: count(loaded.hidden_size),
        page_positions: PAGE_POSITIONS as u32,
        kv_pages: count(loaded.kv_pages),
        weight_bytes: loaded.weight_bytes,
        stream_bytes: loaded.stream_bytes,
        head_bytes: loaded.head_bytes,
        read_limit: loaded.read_limit.unwrap_or(0),
        kv_bytes: loaded.kv_bytes,
        bit_domain: loaded.bit_domain.clone(),
        fabric_handle,
        notes: loaded.notes.clone(),
        model_digest: loaded.model_digest.clone(),
        max_slots: count(loaded.max_slots),
        max_batch_tokens: count(loaded.max_batch_tokens),
    };
    v1::LoadEvent { event: Some(v1::load_event::Event::Loaded(loaded)) }
}

/// What a load is doing.
pub fn progress(progress: Progress) -> v1::LoadEvent {
    let Progress { phase, bytes_done, bytes_total } = progress;
    let progress = v1::LoadProgress { phase: phase.name().into(), bytes_done, bytes_total };
    v1::LoadEvent { event: Some(v1::load_event::Event::Progress(progress)) }
}

/// Checks every field of a plan that can be checked without the state of the batch.
///
/// # Errors
/// Names the plan, the field and its value.
pub fn plan(plan: v1::Plan) -> Result<Plan, PlanFault> {
    let version = plan.version;
    let admit = plan.admit.into_iter().map(|admit| {
        let slot = admit.slot;
        self::admit(admit)
            .map_err(|problem| PlanFault::Field { version, problem: format!("admit of slot {slot}: {problem}") })
    });
    Ok(Plan {
        version,
        steps: plan.steps,
        release: plan.release,
        admit: admit.collect::<Result<_, _>>()?,
        grants: plan.grants.into_iter().map(|g| PageGrant { slot: g.slot, first: g.first, pages: g.pages }).collect(),
        prefill: plan.prefill.into_iter().map(|c| PrefillChunk { slot: c.slot, start: c.start, len: c.len }).collect(),
        decode: plan.decode,
        drafts: plan
            .drafts
            .map_or(Ok(Drafts::default()), drafts)
            .map_err(|problem| PlanFault::Field { version, problem })?,
    })
}

fn drafts(of: v1::Drafts) -> Result<Drafts, String> {
    let times: Vec<_> = of.times.iter().map(|time| StepTime { rows: time.rows, us: time.us }).collect();
    match times.is_sorted_by(|before, after| before.rows < after.rows) {
        true => Ok(Drafts { each: of.each, rows: of.rows, times }),
        false => Err(format!("times of drafts are by rows that do not ascend: {times:?}")),
    }
}

fn admit(admit: v1::Admit) -> Result<Admit, String> {
    if admit.top_logprobs > MAX_TOP_LOGPROBS {
        return Err(format!("top_logprobs is {}, over {MAX_TOP_LOGPROBS}", admit.top_logprobs));
    }
    if admit.prompt_logprobs > Some(MAX_TOP_LOGPROBS) {
        return Err(format!("prompt_logprobs is {:?}, over {MAX_TOP_LOGPROBS}", admit.prompt_logprobs));
    }
    if admit.top_logprobs > 0 && !admit.logprobs {
        return Err(format!("top_logprobs is {} without logprobs", admit.top_logprobs));
    }
    let forbidden: Vec<Vec<u32>> = admit.forbidden.into_iter().map(|sequence| sequence.tokens).collect();
    if forbidden.iter().any(Vec::is_empty) {
        return Err("forbidden has a sequence of no tokens".into());
    }
    let bounds = TokenBounds { allowed: admit.allowed_tokens, forbidden };
    Ok(Admit {
        slot: admit.slot,
        sequence: admit.sequence,
        tokens: admit.tokens,
        prompt_tokens: admit.prompt_tokens,
        max_tokens: admit.max_tokens,
        min_tokens: admit.min_tokens,
        stop_tokens: admit.stop_tokens,
        sampling: sampling(admit.sampling.ok_or("sampling is missing")?)?,
        logprobs: admit.logprobs.then_some(admit.top_logprobs),
        cache_salt: admit.cache_salt,
        prompt_logprobs: admit.prompt_logprobs,
        grammar: (!admit.grammar.is_empty()).then(|| admit.grammar.into()),
        token_bounds: (bounds != TokenBounds::default()).then(|| bounds.into()),
    })
}

fn sampling(sampling: v1::Sampling) -> Result<SamplingParams, String> {
    let s = &sampling;
    // Written so that a NaN is out of every range.
    for (field, value, in_range, range) in [
        ("temperature", s.temperature, s.temperature >= 0.0, "0 or more"),
        ("top_p", s.top_p, s.top_p > 0.0 && s.top_p <= 1.0, "in (0, 1]"),
        ("min_p", s.min_p, (0.0..=1.0).contains(&s.min_p), "in [0, 1]"),
        ("presence_penalty", s.presence_penalty, true, "finite"),
        ("frequency_penalty", s.frequency_penalty, true, "finite"),
        ("repetition_penalty", s.repetition_penalty, s.repetition_penalty > 0.0, "over 0"),
    ] {
        if !in_range || !value.is_finite() {
            return Err(format!("{field} is {value}, but has to be finite and {range}"));
        }
    }
    let mut logit_bias: Vec<(u32, f32)> = sampling.logit_bias.iter().map(|b| (b.token, b.bias)).collect();
    logit_bias.sort_by_key(|(token, _)| *token);
    if let Some((token, bias)) = logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
        return Err(format!("logit_bias of token {token} is {bias}, but has to be finite"));
    }
    if let Some(pair) = logit_bias.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("logit_bias names token {} twice", pair[0].0));
    }
    Ok(SamplingParams {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        seed: sampling.seed,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        repetition_penalty: sampling.repetition_penalty,
        logit_bias,
    })
}

/// What a step yielded.
pub fn outcome(outcome: Outcome) -> v1::Outcome {
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let likely = |top: Vec<(u32, f32)>| {
        top.into_iter().map(|(token, logprob)| v1::TokenLogprob { token, logprob }).collect::<Vec<_>>()
    };
    let prompt = outcome.prompt.into_iter().map(|of| v1::PromptToken {
        sequence: of.sequence,
        position: of.position,
        logprob: of.sampled.logprob.unwrap_or(f32::NAN),
        top: likely(of.sampled.top),
    });
    let tokens = outcome.tokens.into_iter().map(|token| v1::SampledToken {
        sequence: token.sequence,
        token: token.sampled.token,
        finish: finish(token.finish).into(),
        logprob: token.sampled.logprob,
        top: likely(token.sampled.top),
    });
    let drafted = outcome.drafted.into_iter();
    let drafted = drafted.map(|(sequence, tokens)| v1::SequenceDrafts { sequence, tokens: tokens as u32 });
    v1::Outcome {
        version: outcome.version,
        step: outcome.step,
        ran_step: outcome.ran_step,
        tokens: tokens.collect(),
        rows: u32::try_from(outcome.rows).unwrap_or(u32::MAX),
        step_ns: nanoseconds(outcome.step_time),
        wait_ns: outcome.wait_time.map(nanoseconds),
        positions: outcome.positions as u64,
        drafted: drafted.collect(),
        prompt: prompt.collect(),
    }
}

fn finish(finish: Option<Finish>) -> v1::Finish {
    match finish {
        None => v1::Finish::None,
        Some(Finish::Stop) => v1::Finish::Stop,
        Some(Finish::Length) => v1::Finish::Length,
        Some(Finish::Nothing) => v1::Finish::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid() -> v1::Plan {
        let sampling = v1::Sampling { temperature: 1.0, top_p: 1.0, repetition_penalty: 1.0, ..Default::default() };
        let admit = v1::Admit {
            tokens: vec![1],
            prompt_tokens: 1,
            max_tokens: 4,
            sampling: Some(sampling),
            ..Default::default()
        };
        v1::Plan { version: 3, steps: 1, admit: vec![admit], ..Default::default() }
    }

    #[test]
    fn sampling_out_of_range_is_refused_by_name() {
        assert!(plan(valid()).is_ok());
        let nan = f32::NAN;
        type Edit = Box<dyn Fn(&mut v1::Sampling)>;
        let edits: Vec<(&str, Edit)> = vec![
            ("temperature", Box::new(|s| s.temperature = -0.1)),
            ("temperature", Box::new(move |s| s.temperature = nan)),
            ("temperature", Box::new(|s| s.temperature = f32::INFINITY)),
            ("top_p", Box::new(|s| s.top_p = 0.0)),
            ("top_p", Box::new(move |s| s.top_p = nan)),
            ("min_p", Box::new(|s| s.min_p = 1.1)),
            ("presence_penalty", Box::new(move |s| s.presence_penalty = nan)),
            ("frequency_penalty", Box::new(|s| s.frequency_penalty = f32::NEG_INFINITY)),
            ("repetition_penalty", Box::new(|s| s.repetition_penalty = 0.0)),
            ("logit_bias", Box::new(move |s| s.logit_bias = vec![v1::LogitBias { token: 1, bias: nan }])),
            ("logit_bias", Box::new(|s| s.logit_bias = vec![v1::LogitBias { token: 1, bias: 0.5 }; 2])),
        ];
        for (field, edit) in edits {
            let mut wrong = valid();
            edit(wrong.admit[0].sampling.as_mut().unwrap());
            let error = plan(wrong).unwrap_err().to_string();
            assert!(error.contains(field) && error.contains("plan 3"), "{error}");
        }
        let mut wrong = valid();
        wrong.admit[0].sampling = None;
        assert!(plan(wrong).unwrap_err().to_string().contains("sampling is missing"));
        let mut wrong = valid();
        wrong.admit[0].top_logprobs = 5;
        assert!(plan(wrong).unwrap_err().to_string().contains("without logprobs"));
        let mut wrong = valid();
        (wrong.admit[0].logprobs, wrong.admit[0].top_logprobs) = (true, 21);
        assert!(plan(wrong).unwrap_err().to_string().contains("over 20"));
    }

    #[test]
    fn times_of_drafts_are_refused_whose_rows_do_not_ascend() {
        let with = |rows: &[u32]| {
            let times = rows.iter().map(|&rows| v1::StepTime { rows, us: 9 }).collect();
            plan(v1::Plan { drafts: Some(v1::Drafts { each: 7, rows: 4, times }), ..valid() })
        };
        let drafts = with(&[1, 8]).unwrap().drafts;
        assert_eq!((drafts.each, drafts.rows, drafts.times[1]), (7, 4, StepTime { rows: 8, us: 9 }));
        for rows in [[8, 8], [8, 1]] {
            let error = with(&rows).unwrap_err().to_string();
            assert!(error.contains("plan 3") && error.contains("do not ascend"), "{error}");
        }
    }

    #[test]
    fn biases_are_sorted_by_token() {
        let mut unsorted = valid();
        let bias = |token| v1::LogitBias { token, bias: token as f32 };
        unsorted.admit[0].sampling.as_mut().unwrap().logit_bias = vec![bias(7), bias(2)];
        assert_eq!(plan(unsorted).unwrap().admit[0].sampling.logit_bias, [(2, 2.0), (7, 7.0)]);
    }

    #[test]
    fn a_load_request_that_contradicts_itself_is_refused() {
        let valid = v1::LoadRequest {
            model_dir: "m".into(),
            rank: 1,
            tensor_parallel: 2,
            threads: 1,
            max_slots: 4,
            max_batch_tokens: 4,
            kv_pages: 1,
            wait_limit_ms: 1000,
            ..Default::default()
        };
        assert_eq!(load_request(valid.clone()).unwrap().wait_limit, Duration::from_secs(1));
        let alone = load_request(valid.clone()).unwrap();
        assert_eq!((alone.socket(), alone.all_sockets()), (1, 2));
        let third = load_request(v1::LoadRequest { socket: 5, sockets: 8, ..valid.clone() }).unwrap();
        assert_eq!((third.socket(), third.all_sockets()), (5, 8));
        let unlooped = |unlooped| load_request(v1::LoadRequest { unlooped, ..valid.clone() }).unwrap().unlooped;
        assert!(unlooped(true) && !unlooped(false));
        let open = load_request(v1::LoadRequest { max_batch_tokens: 0, ..valid.clone() }).unwrap();
        assert_eq!((open.max_slots, open.max_batch_tokens), (4, 0), "the backend's choice");
        for (edit, says) in [
            ((|r| r.model_dir.clear()) as fn(&mut v1::LoadRequest), "model_dir"),
            (|r| r.rank = 2, "rank 2 of tensor_parallel 2"),
            (|r| (r.socket, r.sockets) = (0, 4), "socket 0 of 4 for rank 1 of 2"),
            (|r| (r.socket, r.sockets) = (3, 3), "socket 3 of 3 for rank 1 of 2"),
            (|r| r.threads = 0, "threads"),
            (|r| r.max_batch_tokens = 3, "max_batch_tokens 3"),
            (|r| r.device = 9, "device is 9"),
            (|r| r.wait_limit_ms = 0, "wait_limit_ms"),
        ] {
            let mut wrong = valid.clone();
            edit(&mut wrong);
            assert!(load_request(wrong).unwrap_err().to_string().contains(says), "{says}");
        }
    }
}
