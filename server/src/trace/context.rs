//! W3C Trace Context: the trace that a request belongs to, as its client says it, or a new one.

use std::{fmt, fmt::Display};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use uuid::Uuid;

const PARENT: HeaderName = HeaderName::from_static("traceparent");
const STATE: HeaderName = HeaderName::from_static("tracestate");
/// Tells the client which span is its request's, as Trace Context has it of level 2 on.
pub const RESPONSE: HeaderName = HeaderName::from_static("traceresponse");
/// Longer states need not be taken on.
const MAX_STATE_BYTES: usize = 512;
/// Of the flags: the trace is recorded.
const SAMPLED: u8 = 1;

/// A request's place in a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    trace: u128,
    /// The request's own.
    span: u64,
    /// The client's.
    parent: Option<u64>,
    sampled: bool,
    state: String,
}

impl Context {
    /// Goes on with the client's trace, if the request names one.
    pub fn continued(headers: &HeaderMap) -> Option<Self> {
        let mut parents = headers.get_all(PARENT).iter();
        let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
        let (trace, parent, flags) = parse(parent.to_str().ok()?)?;
        let states: Vec<&str> = headers.get_all(STATE).iter().filter_map(|state| state.to_str().ok()).collect();
        let state = Some(states.join(",")).filter(|state| state.len() <= MAX_STATE_BYTES).unwrap_or_default();
        Some(Self { trace, span: span_id(), parent: Some(parent), sampled: flags & SAMPLED != 0, state })
    }

    /// A trace that begins here, and is recorded.
    pub fn root() -> Self {
        Self { trace: Uuid::new_v4().as_u128(), span: span_id(), parent: None, sampled: true, state: String::new() }
    }

    /// Whether the trace is recorded. Its client decides that, if it began there.
    pub fn is_sampled(&self) -> bool {
        self.sampled
    }

    /// As logs write it.
    pub fn trace_id(&self) -> impl Display {
        fmt::from_fn(|f| write!(f, "{:032x}", self.trace))
    }

    /// The value of [`RESPONSE`].
    pub fn response(&self) -> HeaderValue {
        let value = format!("00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled));
        HeaderValue::try_from(value).expect("hexadecimal digits and dashes are a header's value")
    }

    pub(super) fn trace_bytes(&self) -> Vec<u8> {
        self.trace.to_be_bytes().into()
    }

    pub(super) fn span_bytes(&self) -> Vec<u8> {
        self.span.to_be_bytes().into()
    }

    pub(super) fn parent_bytes(&self) -> Vec<u8> {
        self.parent.map(|parent| parent.to_be_bytes().into()).unwrap_or_default()
    }

    pub(super) fn state(&self) -> &str {
        &self.state
    }
}

/// A number that no other span has.
pub(super) fn span_id() -> u64 {
    // Half of the bits that tell the version of a UUID meet drawn ones of the other half.
    let (high, low) = Uuid::new_v4().as_u64_pair();
    (high ^ low).max(1)
}

/// `VERSION-TRACE-SPAN-FLAGS`. Versions to come may have more behind it.
fn parse(parent: &str) -> Option<(u128, u64, u8)> {
    let mut fields = parent.split('-');
    let mut number = |digits: usize| {
        let field = fields.next().filter(|field| field.len() == digits)?;
        let lower = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
        field.bytes().all(lower).then(|| u128::from_str_radix(field, 16).ok())?
    };
    let (version, trace, span, flags) = (number(2)?, number(32)?, number(16)?, number(2)?);
    let known = version < 0xff && (version > 0 || fields.next().is_none());
    (known && trace != 0 && span != 0).then_some((trace, span as u64, flags as u8))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT_VALUE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn headers(parents: &[&str], states: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        parents.iter().for_each(|parent| _ = headers.append(PARENT, parent.parse().unwrap()));
        states.iter().for_each(|state| _ = headers.append(STATE, state.parse().unwrap()));
        headers
    }

    #[test]
    fn a_clients_trace_goes_on() {
        let context = Context::continued(&headers(&[PARENT_VALUE], &["a=1", "b=2"])).unwrap();
        assert_eq!(context.trace_id().to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(context.parent_bytes(), 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes());
        assert_eq!((context.is_sampled(), context.state()), (true, "a=1,b=2"));
        let response = context.response().to_str().unwrap().to_owned();
        let (trace, span, flags) = parse(&response).expect("what is told can be read");
        assert_eq!((trace, flags), (0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, 1));
        assert_ne!(span, 0x00f0_67aa_0ba9_02b7, "the request has a span of its own");
        let unsampled = Context::continued(&headers(&[&PARENT_VALUE.replace("-01", "-00")], &[])).unwrap();
        assert!(!unsampled.is_sampled() && unsampled.response().to_str().unwrap().ends_with("-00"));
        assert_eq!(Context::continued(&headers(&[PARENT_VALUE], &[&"x".repeat(513)])).unwrap().state(), "");
    }

    #[test]
    fn what_is_no_parent_counts_as_none() {
        for parent in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(Context::continued(&headers(&[parent], &[])), None, "{parent}");
        }
        assert_eq!(Context::continued(&headers(&[PARENT_VALUE, PARENT_VALUE], &[])), None, "two of them");
        let later = format!("{}-more", PARENT_VALUE.replacen("00", "cc", 1));
        assert!(Context::continued(&headers(&[&later], &[])).is_some(), "later versions may say more");
    }
}
