//! Everything that crosses comes out as it went in, through the bytes of the wire.

use proptest::array::uniform8;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use prost::Message;

use super::*;

/// A message as the other end reads it.
fn sent<M: Message + Default>(message: M) -> M {
    M::decode(message.encode_to_vec().as_slice()).unwrap()
}

/// Any number but NaN, which equals nothing.
fn number() -> impl Strategy<Value = f32> {
    prop_oneof![any::<f32>().prop_filter("NaN", |number| !number.is_nan()), Just(f32::NEG_INFINITY), Just(-0.0)]
}

fn scores() -> impl Strategy<Value = Vec<(u32, f32)>> {
    vec((any::<u32>(), number()), 0..4)
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let numbers = proptest::array::uniform6(number());
    (numbers, any::<u32>(), any::<u64>(), scores()).prop_map(|(numbers, top_k, seed, logit_bias)| {
        let [temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty] = numbers;
        SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            logit_bias,
        }
    })
}

fn requests() -> impl Strategy<Value = SequenceRequest> {
    let tokens = || vec(any::<u32>(), 0..9);
    let lengths = (1u32.., any::<u32>(), option::of(any::<u32>()), option::of(any::<u32>()));
    let bounds = (tokens(), vec(tokens(), 0..3));
    (vec(any::<u32>(), 1..9), tokens(), lengths, sampling(), ".*", option::of(".*"), bounds).prop_map(
        |(
            prompt,
            stop_tokens,
            (max_tokens, min_tokens, logprobs, prompt_logprobs),
            sampling,
            salt,
            grammar,
            bounds,
        )| {
            let (allowed, forbidden) = bounds;
            SequenceRequest {
                prompt,
                max_tokens,
                min_tokens,
                stop_tokens,
                sampling,
                logprobs,
                cache_salt: salt.into(),
                grammar: grammar.map(Into::into),
                token_bounds: TokenBounds { allowed, forbidden }.into(),
                prompt_logprobs,
            }
        },
    )
}

fn tokens() -> impl Strategy<Value = GeneratedToken> {
    (any::<u32>(), option::of(number()), scores()).prop_map(|(id, logprob, top)| GeneratedToken { id, logprob, top })
}

fn handed() -> impl Strategy<Value = Handed> {
    let standing = (any::<i32>(), option::of(".*"), any::<u32>());
    let counts = (any::<u32>(), any::<u32>(), any::<u32>(), any::<bool>());
    (requests(), standing, vec(any::<u32>(), 0..9), vec(tokens(), 0..3), counts).prop_map(
        |(request, (priority, owner, weight), generated, prompt_logprobs, counts)| {
            let (cached_tokens, losses, tokens_since_loss, was_admitted) = counts;
            let standing = Standing { priority, owner: owner.map(Into::into), weight };
            Handed {
                request,
                standing,
                generated,
                prompt_logprobs,
                cached_tokens,
                was_admitted,
                losses,
                tokens_since_loss,
            }
        },
    )
}

fn events() -> impl Strategy<Value = Passed> {
    let prompt = (any::<u32>(), any::<u64>(), vec(tokens(), 0..3));
    prop_oneof![
        prompt.prop_map(|(cached_tokens, prefill_ns, logprobs)| {
            Passed::Prompt { cached_tokens, prefill: Duration::from_nanos(prefill_ns), logprobs }
        }),
        (any::<u32>(), any::<u32>()).prop_map(|(drafted, accepted)| Passed::Drafts(DraftStep { drafted, accepted })),
        tokens().prop_map(Passed::Token),
        Just(Passed::Finished(FinishReason::Stop)),
        Just(Passed::Finished(FinishReason::Length)),
        ".*".prop_map(Passed::Failed),
        Just(Passed::Contradiction),
    ]
}

fn refusals() -> impl Strategy<Value = SubmitError> {
    let (two, text) = (|| (any::<u64>(), any::<u64>()), || ".*");
    prop_oneof![
        (two(), text())
            .prop_map(|((waiting, limit), what)| { SubmitError::QueueFull { waiting, limit, what: what.into() } }),
        two().prop_map(|(needed, available)| SubmitError::TooLarge { needed, available }),
        (two(), text(), text()).prop_map(|((asked, limit), what, option)| {
            SubmitError::NeverFits { asked, limit, what: what.into(), option: option.into() }
        }),
        any::<u64>().prop_map(|seconds_left| SubmitError::Quarantined { seconds_left }),
        text().prop_map(SubmitError::Unavailable),
    ]
}

fn statuses() -> impl Strategy<Value = HostStatus> {
    let state = prop_oneof![
        ".*".prop_map(EngineState::Loading),
        Just(EngineState::Ready),
        ".*".prop_map(EngineState::Recovering),
        Just(EngineState::Draining),
        ".*".prop_map(EngineState::Failed),
    ];
    (state, uniform8(0..=MOST_OF_ANY)).prop_map(|(state, numbers)| {
        let [running, waiting, kv_pages_used, kv_pages_cached, kv_pages, preemptions, page_positions, kv_bytes] =
            numbers;
        let load = Load { running, waiting, kv_pages_used, kv_pages_cached, kv_pages, preemptions };
        HostStatus { state, load, page_positions, kv_bytes }
    })
}

proptest! {
    #[test]
    fn requests_and_sequences_that_were_begun_cross_whole(number in any::<u64>(), of in handed()) {
        prop_assert_eq!(request_of(sent(request(&of.request))), Ok(of.request.clone()));
        prop_assert_eq!(adopted(sent(adopt(number, &of))), Ok((number, of)));
    }

    #[test]
    fn events_cross_whole(of in events()) {
        prop_assert_eq!(event_of(sent(event(of.clone()))), Ok(of));
    }

    #[test]
    fn refusals_and_states_cross_whole(error in refusals(), of in statuses()) {
        prop_assert_eq!(refusal_of(sent(refusal(error.clone()))), Ok(error));
        prop_assert_eq!(status_of(sent(status(of.clone()))), Ok(of));
    }
}

#[test]
fn models_and_cancels_cross_whole() {
    let of = ModelInfo {
        model_digest: "digest".into(),
        architecture: "llama".into(),
        vocab_size: 1,
        max_context: 2,
        tensor_parallel: 4,
        bit_domain: "bits".into(),
    };
    assert_eq!(model_of(sent(model(&of))), of);
    for because in [Unwanted::Complete, Unwanted::Abandoned, Unwanted::GivenUp] {
        assert_eq!(cancelled(sent(cancel(7, because))), Ok((7, because)));
    }
}

#[test]
fn what_another_version_may_send_is_refused_by_name() {
    assert_eq!(request_of(wire::SequenceRequest::default()), Err(Malformed("the prompt or max_tokens of a request")));
    assert_eq!(event_of(wire::Event::default()), Err(Malformed("an event")));
    let finished = wire::Event { event: Some(wire::event::Event::Finished(9)) };
    assert_eq!(event_of(finished), Err(Malformed("the reason of an end")));
    assert_eq!(cancelled(wire::Cancel { sequence: 1, because: 9 }), Err(Malformed("the reason of a cancel")));
    let status = wire::Status { state: 9, load: Some(wire::Load::default()), ..wire::Status::default() };
    assert_eq!(status_of(status.clone()), Err(Malformed("the state of a host")));
    let long = wire::Status { words: "a".repeat(MOST_WORDS_BYTES + 1), ..status.clone() };
    let much = wire::Load { waiting: MOST_OF_ANY + 1, ..wire::Load::default() };
    for status in [long, wire::Status { load: Some(much), ..status }] {
        assert_eq!(status_of(status), Err(Malformed("a load that a host can have, or what it says in few words")));
    }
}
