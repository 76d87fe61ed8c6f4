//! The body of a call whose first message has to be short: what comes behind may be long, but not from everybody.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::body::{Body, Bytes, Frame, SizeHint};
use tonic::Status;

use super::MOST_HELLO_BYTES;

/// In front of each message: a flag, and the message's length in four bytes.
const PREFIX_BYTES: usize = 5;

/// A body that breaks where its first message says that it is too long, before there is room for that.
#[derive(Debug)]
pub(super) struct ShortFirst<B> {
    body: B,
    prefix: Vec<u8>,
}

impl<B> ShortFirst<B> {
    pub(super) fn new(body: B) -> Self {
        Self { body, prefix: Vec::with_capacity(PREFIX_BYTES) }
    }

    fn look(&mut self, data: &[u8]) -> Result<(), Status> {
        let missing = PREFIX_BYTES - self.prefix.len();
        if missing == 0 {
            return Ok(());
        }
        self.prefix.extend(data.iter().take(missing));
        let &[_, a, b, c, d] = &self.prefix[..] else { return Ok(()) };
        match u32::from_be_bytes([a, b, c, d]) {
            0..=MOST_HELLO_BYTES => Ok(()),
            bytes => Err(Status::out_of_range(format!("it has {bytes} bytes, and may have {MOST_HELLO_BYTES}"))),
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for ShortFirst<B>
where
    B::Error: Into<tonic::codegen::StdError>,
{
    type Data = Bytes;
    type Error = tonic::codegen::StdError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(Into::into)?;
            if let Some(data) = frame.data_ref() {
                self.look(data)?;
            }
            Ok(frame)
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_seen_however_it_is_cut_and_only_that_of_the_first_message() {
        let long = [0, 0, 1, 0, 1];
        for cut in 0..=long.len() {
            let mut body = ShortFirst::new(());
            let looked = body.look(&long[..cut]).and_then(|()| body.look(&long[cut..]));
            assert!(looked.unwrap_err().message().contains("65537 bytes, and may have 65536"), "{cut}");
        }
        let mut body = ShortFirst::new(());
        body.look(&[0, 0, 1, 0, 0, 255, 255, 255, 255, 255]).unwrap();
        body.look(&long).unwrap();
    }
}
