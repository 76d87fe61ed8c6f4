//! What a generation makes known, as messages.

use futures::{Stream, StreamExt, stream};
use looplane_proto::inference::v1::{
    Delta, FinishReason, Finished, GenerateResponse, Started, Token, ToolCallDelta, TopLogprob,
    generate_response::Event,
};
use tonic::Status;

use super::refused;
use crate::{
    engine::{GeneratedToken, client_logprob},
    frontend::{Choices, Frontend, Generation, Replies, ReplyEnd, ReplyEvent, Told},
    text::OutputToken,
};

/// The call going away drops the stream, and with it the sequences.
pub(super) fn stream(
    generation: Generation,
    include_reasoning: bool,
    frontend: &Frontend,
) -> impl Stream<Item = Result<GenerateResponse, Status>> + Send + use<> {
    let (metrics, bit_domain) = (frontend.metrics.clone(), generation.model.bit_domain.clone());
    let Replies { request, choices, place } = Replies::new(generation, include_reasoning);
    let prompt_tokens = request.prompt_tokens() as u32;
    let started = Event::Started(Started {
        request_id: place.record.request_id().as_str().to_owned(),
        model: frontend.model_id.clone(),
        prompt_tokens,
        seed: request.sampling.seed,
        bit_domain,
    });
    let with_logprobs = request.logprobs.is_some();
    let events = Choices::from(choices).map(move |(index, event)| {
        // Its place is free when the stream ends.
        let _ = &place;
        let event = event.map_err(|error| refused(&metrics, error))?;
        Ok(response(message(index, event, prompt_tokens, with_logprobs)))
    });
    stream::iter([Ok(response(started))]).chain(events)
}

fn response(event: Event) -> GenerateResponse {
    GenerateResponse { event: Some(event) }
}

fn message(index: u32, event: ReplyEvent, prompt_tokens: u32, with_logprobs: bool) -> Event {
    match event {
        ReplyEvent::Delta { told, tokens, generated } => {
            let mut delta = Delta { index, generated, ..Delta::default() };
            told.into_iter().for_each(|told| tell(&mut delta, told));
            delta.tokens = tokens.into_iter().map(|OutputToken { token: of, .. }| token(of, with_logprobs)).collect();
            Event::Delta(delta)
        }
        ReplyEvent::Finished {
            reason,
            stop_text,
            completion_tokens,
            cached_tokens,
            prompt_logprobs,
            generated,
            ..
        } => {
            let reason = match reason {
                ReplyEnd::Stop => FinishReason::Stop,
                ReplyEnd::Length => FinishReason::Length,
                ReplyEnd::ToolCalls => FinishReason::ToolCalls,
            };
            let prompt = prompt_logprobs.into_iter().map(|of| token(of, true)).collect();
            let reason = reason.into();
            Event::Finished(Finished {
                reason,
                prompt_tokens,
                completion_tokens,
                cached_tokens,
                index,
                stop_text,
                prompt,
                generated,
            })
        }
    }
}

fn tell(delta: &mut Delta, told: Told) {
    match told {
        Told::Content(text) => delta.text.push_str(&text),
        Told::Reasoning(text) => delta.reasoning.push_str(&text),
        Told::Call { index, id, name } => {
            delta.tool_calls.push(ToolCallDelta { index, id, name, arguments: String::new() });
        }
        // Behind the beginning of its call, or behind more of its arguments, there is one message for both.
        Told::Arguments { index, text } => match delta.tool_calls.last_mut() {
            Some(call) if call.index == index => call.arguments.push_str(&text),
            _ => delta.tool_calls.push(ToolCallDelta { index, arguments: text, ..ToolCallDelta::default() }),
        },
    }
}

fn token(token: GeneratedToken, with_logprobs: bool) -> Token {
    let top = |(id, logprob)| TopLogprob { id, logprob: client_logprob(logprob) };
    Token {
        id: token.id,
        logprob: token.logprob.filter(|_| with_logprobs).map(client_logprob),
        top: token.top.into_iter().map(top).collect(),
    }
}
